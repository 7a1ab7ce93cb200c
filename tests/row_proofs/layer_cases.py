"""Cases of layers of Keras."""

from __future__ import annotations

from keras import layers

from keras_strategies.rows.row_placements import MEAN, SAME
from row_proofs import case_layers as own
from row_proofs.case_layers import Around
from row_proofs.row_case import ids, mixing, rows

KERAS_LAYERS = [
    rows("dense", lambda: layers.Dense(5, "relu"), (6,)),
    rows("dense 3-D", lambda: layers.Dense(5, "gelu"), (3, 6)),
    rows("layer norm", lambda: layers.LayerNormalization(), (6,)),
    rows("layer norm 3-D", lambda: layers.LayerNormalization(), (3, 6)),
    rows("rms norm", lambda: layers.RMSNormalization(), (6,)),
    rows("unit norm", lambda: layers.UnitNormalization(), (6,)),
    rows("group norm", lambda: layers.GroupNormalization(2), (5, 5, 6)),
    rows("batch norm", lambda: layers.BatchNormalization(), (6,), updates=(SAME, SAME)),
    rows(
        "batch norm of images",
        lambda: layers.BatchNormalization(),
        (5, 5, 3),
        updates=(SAME, SAME),
    ),
    rows(
        "batch norm and a loss",
        lambda: own.Regularized(),
        (6,),
        losses=(MEAN,),
        updates=(SAME, SAME),
    ),
    rows(
        "spectral norm",
        lambda: layers.SpectralNormalization(layers.Dense(4)),
        (6,),
        updates=(SAME, SAME),
    ),
    rows("dropout", lambda: layers.Dropout(0.3), (6,), draws=True),
    rows("spatial dropout", lambda: layers.SpatialDropout1D(0.3), (4, 6), draws=True),
    rows(
        "dropout shared by the batch",
        lambda: layers.Dropout(0.3, noise_shape=(1, 6)),
        (6,),
    ),
    rows("gaussian noise", lambda: layers.GaussianNoise(0.3), (6,), draws=True),
    rows("alpha dropout", lambda: layers.AlphaDropout(0.3), (6,), draws=True),
    rows("embedding", lambda: layers.Embedding(9, 4), ids(6)),
    rows("reversible embedding", lambda: layers.ReversibleEmbedding(9, 4), ids(6)),
    rows("conv2d", lambda: layers.Conv2D(4, 3, padding="same"), (7, 7, 3)),
    rows("conv2d dilated", lambda: layers.Conv2D(4, 3, dilation_rate=2), (9, 9, 3)),
    rows("conv2d in groups", lambda: layers.Conv2D(4, 3, groups=2), (7, 7, 4)),
    rows("separable conv", lambda: layers.SeparableConv2D(4, 3), (7, 7, 3)),
    rows("separable conv 1-D", lambda: layers.SeparableConv1D(4, 3), (6, 3)),
    rows("conv3d", lambda: layers.Conv3D(4, 2), (4, 4, 4, 2)),
    rows("depthwise conv", lambda: layers.DepthwiseConv2D(3), (7, 7, 3)),
    rows("causal conv", lambda: layers.Conv1D(4, 3, padding="causal"), (7, 3)),
    rows(
        "causal dilated conv",
        lambda: layers.Conv1D(4, 3, padding="causal", dilation_rate=2),
        (9, 3),
    ),
    rows("conv transpose", lambda: layers.Conv2DTranspose(4, 3, strides=2), (5, 5, 3)),
    rows("conv transpose 1-D", lambda: layers.Conv1DTranspose(4, 3), (6, 3)),
    rows("max pool", lambda: layers.MaxPooling2D(2), (8, 8, 3)),
    rows("average pool", lambda: layers.AveragePooling2D(2), (8, 8, 3)),
    rows("max pool 3-D", lambda: layers.MaxPooling3D(2), (4, 4, 4, 2)),
    rows("average pool 1-D", lambda: layers.AveragePooling1D(2), (4, 3)),
    rows("global average", lambda: layers.GlobalAveragePooling2D(), (7, 7, 3)),
    rows("global max", lambda: layers.GlobalMaxPooling1D(), (7, 3)),
    rows("flatten", lambda: layers.Flatten(), (5, 3)),
    rows("reshape layer", lambda: layers.Reshape((3, 5)), (5, 3)),
    rows("permute", lambda: layers.Permute((2, 1)), (5, 3)),
    rows("causal attention", lambda: own.SelfAttention(), (5, 8)),
    rows(
        "attention dropout",
        lambda: own.SelfAttention(dropout=0.2),
        (5, 8),
        draws=True,
    ),
    rows(
        "dot-product attention",
        lambda: Around(layers.Attention(), lambda x: [x, x]),
        (5, 3),
    ),
    rows(
        "additive attention",
        lambda: Around(layers.AdditiveAttention(), lambda x: [x, x]),
        (5, 3),
    ),
    rows(
        "masked attention",
        lambda: own.masked(lambda: own.SelfAttention()),
        ids(5),
    ),
    rows("LSTM", lambda: layers.LSTM(4), (5, 3)),
    rows(
        "LSTM with dropout",
        lambda: layers.LSTM(4, dropout=0.2, recurrent_dropout=0.2),
        (5, 3),
        draws=True,
    ),
    rows("masked LSTM", lambda: own.masked(lambda: layers.LSTM(4)), ids(5)),
    rows("GRU", lambda: layers.GRU(4, return_sequences=True), (5, 3)),
    rows("unrolled GRU", lambda: layers.GRU(4, unroll=True), (5, 3)),
    rows("simple RNN", lambda: layers.SimpleRNN(4), (5, 3)),
    rows(
        "two cells",
        lambda: layers.RNN([layers.LSTMCell(4), layers.LSTMCell(3)]),
        (5, 3),
    ),
    rows(
        "bidirectional",
        lambda: layers.Bidirectional(layers.GRU(4, return_sequences=True)),
        (5, 3),
    ),
    rows(
        "masked bidirectional",
        lambda: own.masked(lambda: layers.Bidirectional(layers.GRU(4))),
        ids(5),
    ),
    mixing("stateful GRU", lambda: layers.GRU(4, stateful=True), (5, 3)),
    rows("ConvLSTM", lambda: layers.ConvLSTM1D(4, 3), (4, 6, 2)),
    rows("time distributed", lambda: layers.TimeDistributed(layers.Dense(4)), (5, 3)),
    rows("einsum dense", lambda: layers.EinsumDense("abc,cd->abd", (None, 4)), (5, 3)),
    rows(
        "einsum dense with heads",
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="de"),
        (5, 3),
    ),
    rows("softmax layer", lambda: layers.Softmax(), (6,)),
    rows("upsampling", lambda: layers.UpSampling2D(2), (4, 4, 3)),
    rows(
        "bilinear upsampling",
        lambda: layers.UpSampling2D(2, interpolation="bilinear"),
        (4, 4, 3),
    ),
    rows("zero padding", lambda: layers.ZeroPadding2D(1), (4, 4, 3)),
    rows("cropping", lambda: layers.Cropping2D(1), (5, 5, 3)),
    rows("repeat vector", lambda: layers.RepeatVector(3), (5,)),
    rows(
        "concatenate", lambda: Around(layers.Concatenate(), lambda x: [x, 2 * x]), (6,)
    ),
    mixing(
        "concatenate rows",
        lambda: Around(layers.Concatenate(axis=0), lambda x: [x, 2 * x]),
        (6,),
    ),
    rows("dot", lambda: Around(layers.Dot(1), lambda x: [x, 2 * x]), (6,)),
    rows("PReLU", lambda: layers.PReLU(), (6,)),
    rows("normalization", lambda: layers.Normalization(mean=0.0, variance=1.0), (6,)),
    rows("resizing", lambda: layers.Resizing(4, 4), (6, 6, 3)),
    rows("category encoding", lambda: layers.CategoryEncoding(5, "multi_hot"), ids(6)),
    rows(
        "activity regularizer",
        lambda: layers.Dense(3, activity_regularizer="l2"),
        (6,),
        losses=(MEAN,),
    ),
    rows("kernel regularizer", lambda: layers.Dense(3, kernel_regularizer="l2"), (6,)),
    rows("transformer", lambda: own.transformer(), ids(5)),
    rows(
        "transformer of two blocks with dropout",
        lambda: own.transformer(2, rate=0.1),
        ids(5),
        draws=True,
    ),
]
