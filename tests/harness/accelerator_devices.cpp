// Devices of Torch's type PrivateUse1, which other code implements in Python.
//
// Torch's own registration from Python (`torch._C._acc`) has one device and no streams.
// Autograd starts a thread for each device that is registered here; as on a GPU, the
// current device and the current stream of each device belong to a thread.

#include <Python.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>

namespace {

constexpr int kMost = 16;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kMost> current_streams{};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  explicit Guard(int count) : count(static_cast<c10::DeviceIndex>(count)) {}

  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {type(), current_device};
  }
  void setDevice(c10::Device device) const override {
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams[device.index()]);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> made{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++made);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return count;
  }

  // Each operation has ended when it returns, so that events have nothing to order.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}

  c10::DeviceIndex count;
};

} // namespace

// Registers the devices; false if the process has others of this type.
extern "C" bool register_devices(int count) {
  if (count > kMost || c10::impl::hasDeviceGuardImpl(c10::DeviceType::PrivateUse1)) {
    return false;
  }
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard(count));
  return true;
}

// Of a DLManagedTensor: `manager_ctx`, its second last member, is a Python object that
// owns its memory.
extern "C" void release_owner(void** members) {
  if (Py_IsInitialized()) {
    PyGILState_STATE state = PyGILState_Ensure();
    Py_DECREF(static_cast<PyObject*>(members[6]));
    PyGILState_Release(state);
  }
}
