"""The data-parallel call: a layer call with its rows split over replicas."""
