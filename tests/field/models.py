"""Models of keras-hub's classes, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
from harness.data import Data
from harness.training import ADAM_TOLERANCE
from keras import layers

from field.compare import FieldCase

hub = keras_hub.models
VOCABULARY, LENGTH, CLASSES, SIZE = 40, 8, 3, 16
PICTURE, LATENT = (SIZE, SIZE, 3), (SIZE // 2, SIZE // 2, 4)


# --- Data ---------------------------------------------------------------------


def _words(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of shape (rows, LENGTH), padded with zeros, and their mask."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, VOCABULARY, (rows, LENGTH))
    mask = np.arange(LENGTH) < random.integers(2, LENGTH + 1, rows)[:, None]
    return (ids * mask).astype("int32"), mask.astype("int32")


def sentences(rows: int) -> Data:
    """One class for each sentence."""
    ids, mask = _words(rows, 1)
    classes = np.random.default_rng(2).integers(0, CLASSES, rows)
    return Data({"token_ids": ids, "padding_mask": mask}, classes)


def sentence_pairs(rows: int) -> Data:
    data = sentences(rows)
    segments = (np.arange(LENGTH) >= LENGTH // 2).astype("int32")
    return Data({**data.x, "segment_ids": np.tile(segments, (rows, 1))}, data.y)


def next_words(rows: int) -> Data:
    """The next token for each, weighted by the padding's mask."""
    ids, mask = _words(rows, 3)
    x = {"token_ids": ids, "padding_mask": mask}
    return Data(x, np.roll(ids, -1, axis=1), mask.astype("float32"))


def words(rows: int) -> Data:
    """The next token for each, of sentences without a padding's mask."""
    data = next_words(rows)
    return Data({"token_ids": data.x["token_ids"]}, data.y, data.w)


def translations(rows: int) -> Data:
    source, source_mask = _words(rows, 4)
    target, target_mask = _words(rows, 5)
    x = {
        "encoder_token_ids": source,
        "encoder_padding_mask": source_mask,
        "decoder_token_ids": target,
        "decoder_padding_mask": target_mask,
    }
    return Data(x, np.roll(target, -1, axis=1), target_mask.astype("float32"))


def transcripts(rows: int) -> Data:
    data = translations(rows)
    sound = np.random.default_rng(6).normal(size=(rows, 2 * LENGTH, 4))
    x = {key: data.x[key] for key in ("decoder_token_ids", "decoder_padding_mask")}
    return Data({**x, "encoder_features": sound.astype("float32")}, data.y, data.w)


def pictures(rows: int) -> Data:
    random = np.random.default_rng(7)
    x = random.uniform(-1, 1, (rows, *PICTURE)).astype("float32")
    return Data(x, random.integers(0, CLASSES, rows))


def to_be_rebuilt(rows: int) -> Data:
    """Pictures, which are the targets as well."""
    x = pictures(rows).x
    return Data(x, x)


def latents(rows: int) -> Data:
    """Noisy latents of pictures with text, and the velocity to them."""
    random = np.random.default_rng(8)
    shapes = {
        "latent": LATENT,
        "context": (LENGTH, 12),
        "pooled_projection": (10,),
        "timestep": (1,),
    }
    x = {k: random.normal(size=(rows, *s)).astype("float32") for k, s in shapes.items()}
    return Data(x, random.normal(size=x["latent"].shape).astype("float32"))


# --- Models -------------------------------------------------------------------

# Of most transformers: a vocabulary, two layers of two heads, no dropout, because
# replicas draw different masks.
LAYERS = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
TEXT = {"vocabulary_size": VOCABULARY, **LAYERS}
SHAPE = {**TEXT, "num_heads": 2, "dropout": 0.0}
ENCODER = {**SHAPE, "max_sequence_length": LENGTH}
GROUPED = {**TEXT, "num_query_heads": 2, "num_key_value_heads": 1}


def sgd() -> Any:
    return keras.optimizers.SGD(0.05)


def adam() -> Any:
    return keras.optimizers.Adam(1e-3)


def compiled(model: keras.Model, optimizer: Callable[[], Any] = sgd) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if isinstance(model, (hub.CausalLM, hub.Seq2SeqLM)):
        model.compile(optimizer(), loss, weighted_metrics=None, sampler="greedy")
    else:
        model.compile(optimizer(), loss, metrics=None)
    return model


def classifier(name: str, optimizer: Callable[[], Any] = sgd, **shape: Any) -> Any:
    def build() -> keras.Model:
        backbone = getattr(hub, f"{name}Backbone")(**{**ENCODER, **shape})
        task = getattr(hub, f"{name}TextClassifier")
        return compiled(task(backbone, num_classes=CLASSES, dropout=0.0), optimizer)

    return build


def language_model(
    name: str,
    optimizer: Callable[[], Any] = sgd,
    lora: bool = False,
    quantized: bool = False,
    **shape: Any,
) -> Any:
    def build() -> keras.Model:
        backbone = getattr(hub, f"{name}Backbone")(**shape)
        model = getattr(hub, f"{name}CausalLM")(backbone, preprocessor=None)
        if quantized:
            model.quantize("int8")
        if lora:
            backbone.enable_lora(2)
        return compiled(model, optimizer)

    return build


def with_head(backbone: keras.Model, outputs: Any) -> keras.Model:
    logits = layers.Dense(VOCABULARY, name="logits")(outputs)
    return compiled(keras.Model(backbone.input, logits))


def t5() -> keras.Model:
    backbone = hub.T5Backbone(**SHAPE)
    return with_head(backbone, backbone.output["decoder_sequence_output"])


def bart() -> keras.Model:
    return compiled(hub.BartSeq2SeqLM(hub.BartBackbone(**ENCODER), preprocessor=None))


def whisper() -> keras.Model:
    backbone = hub.WhisperBackbone(
        **SHAPE,
        num_mels=4,
        max_encoder_sequence_length=2 * LENGTH,
        max_decoder_sequence_length=LENGTH,
    )
    return with_head(backbone, backbone.output["decoder_sequence_output"])


def of_pictures(
    name: str, hub_name: str, pooling: str | None = None, **shape: Any
) -> FieldCase:
    def build() -> keras.Model:
        backbone = getattr(hub, f"{hub_name}Backbone")(**shape)
        if pooling is None:
            return compiled(hub.ImageClassifier(backbone, num_classes=CLASSES))
        task = getattr(hub, f"{hub_name}ImageClassifier")
        return compiled(task(backbone, num_classes=CLASSES, pooling=pooling))

    return FieldCase(name, build, pictures)


def fits_numbers(model: keras.Model) -> keras.Model:
    model.compile(sgd(), "mse")
    return model


def diffusion_transformer() -> keras.Model:
    """That of Stable Diffusion 3."""
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    return fits_numbers(
        MMDiT(
            patch_size=2,
            hidden_dim=16,
            num_layers=2,
            num_heads=2,
            position_size=8,
            qk_norm=None,
            mlp_ratio=2,
            latent_shape=LATENT,
            context_shape=(LENGTH, 12),
            pooled_projection_shape=(10,),
        )
    )


def text_encoder() -> keras.Model:
    """CLIP's, as in Stable Diffusion 3."""
    shape = {**TEXT, "num_heads": 2, "max_sequence_length": LENGTH}
    encoder = hub.CLIPTextEncoder(embedding_dim=16, **shape)
    return with_head(encoder, encoder.output)


def autoencoder() -> keras.Model:
    """That of Stable Diffusion, without its random sample."""
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    return fits_numbers(
        VAEBackbone(
            # Its groups of channels are 32.
            encoder_num_filters=[32, 32],
            encoder_num_blocks=[1, 1],
            decoder_num_filters=[32, 32],
            decoder_num_blocks=[1, 1],
            sampler_method="mode",
            sample_channels=8,
        )
    )


def of_sentences(name: str, hub_name: str, **kwargs: Any) -> FieldCase:
    data = sentence_pairs if hub_name in ("Bert", "Albert") else sentences
    build = classifier(hub_name, **kwargs)
    return FieldCase(name, build, data, **_tolerance(kwargs))


def of_next_words(name: str, hub_name: str, **kwargs: Any) -> FieldCase:
    build = language_model(hub_name, **kwargs)
    return FieldCase(name, build, next_words, **_tolerance(kwargs))


def _tolerance(given: dict[str, Any]) -> dict[str, Any]:
    return {"tolerance": ADAM_TOLERANCE} if "optimizer" in given else {}


EXPERTS = {
    **GROUPED,
    "num_experts": 4,
    "top_k": 2,
    "moe_intermediate_dim": 16,
    "shared_expert_intermediate_dim": 16,
}
PHI = {**GROUPED, "max_sequence_length": LENGTH, "pretraining_sequence_length": LENGTH}
FALCON = {k: v for k, v in SHAPE.items() if k not in ("num_heads", "dropout")}
CASES = [
    of_sentences("bert", "Bert"),
    of_sentences("roberta", "Roberta"),
    of_sentences("deberta", "DebertaV3", bucket_size=4),
    of_sentences("albert", "Albert", embedding_dim=8),
    of_sentences("distilbert_adam", "DistilBert", optimizer=adam),
    of_next_words("gpt2", "GPT2", **ENCODER),
    of_next_words("opt", "OPT", **ENCODER),
    of_next_words("bloom", "Bloom", **SHAPE),
    of_next_words("falcon", "Falcon", num_attention_heads=2, **FALCON),
    of_next_words("llama_adam", "Llama", optimizer=adam, **GROUPED),
    of_next_words("gemma", "Gemma", head_dim=8, **GROUPED),
    of_next_words("mistral", "Mistral", **GROUPED),
    of_next_words("phi3", "Phi3", **PHI),
    of_next_words("qwen", "Qwen", **GROUPED),
    of_next_words("mixtral", "Mixtral", num_experts=4, **GROUPED),
    of_next_words("qwen_moe", "QwenMoe", **EXPERTS),
    of_next_words("gpt2_int8", "GPT2", quantized=True, **ENCODER),
    of_next_words("llama_lora", "Llama", lora=True, **GROUPED),
    of_next_words("mistral_int8_lora", "Mistral", lora=True, quantized=True, **GROUPED),
    FieldCase("t5", t5, translations),
    FieldCase("bart", bart, translations),
    FieldCase("whisper", whisper, transcripts),
    of_pictures(
        "vit",
        "ViT",
        pooling="token",
        image_shape=PICTURE,
        patch_size=(4, 4),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
    ),
    of_pictures(
        "resnet",
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=PICTURE,
    ),
    of_pictures(
        "efficientnet",
        "EfficientNet",
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[1, 2],
        stackwise_squeeze_and_excite_ratios=[0.25, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["v1", "fused"],
        dropout=0.0,
        num_features=16,
        input_shape=PICTURE,
    ),
    of_pictures(
        "mobilenet",
        "MobileNet",
        stackwise_expansion=[[16, 24]],
        stackwise_num_blocks=[2],
        stackwise_num_filters=[[8, 8]],
        stackwise_kernel_size=[[3, 3]],
        stackwise_num_strides=[[2, 1]],
        stackwise_se_ratio=[[None, 0.25]],
        stackwise_activation=[["relu", "hard_swish"]],
        stackwise_padding=[[1, 1]],
        output_num_filters=16,
        depthwise_filters=8,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=32,
        squeeze_and_excite=0.5,
        image_shape=PICTURE,
        input_num_filters=8,
    ),
    of_pictures(
        "densenet",
        "DenseNet",
        stackwise_num_repeats=[1, 1],
        growth_rate=4,
        image_shape=PICTURE,
    ),
]
#: Parts of Stable Diffusion 3, trained with sharded variables only.
DIFFUSION = [
    FieldCase("diffusion_transformer", diffusion_transformer, latents),
    FieldCase("text_encoder", text_encoder, words),
    FieldCase("autoencoder", autoencoder, to_be_rebuilt),
]
