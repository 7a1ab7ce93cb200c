"""Rules of random numbers."""

from __future__ import annotations

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    SAME,
    Kind,
    MixesRowsError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

#: `(shape, seed, ...)`, or `(shape, key, counter, algorithm, ...)`.
STATELESS = """
    StatelessRandomUniformV2 StatelessRandomNormalV2 StatelessTruncatedNormalV2
    StatelessRandomUniform StatelessRandomNormal StatelessTruncatedNormal
    StatelessRandomUniformInt StatelessRandomUniformIntV2 StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2
"""
#: With a state of its own in each operation, or in a `tf.random.Generator`.
STATEFUL = """
    RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt RandomGamma
    RandomPoisson RandomPoissonV2 ParameterizedTruncatedNormal Multinomial RandomShuffle
    RngReadAndSkip RngSkip StatefulRandomBinomial StatefulStandardNormalV2
    StatefulTruncatedNormal StatefulUniform StatefulUniformInt StatefulUniformFullInt
"""
#: `(shape, seed, parameters...)`, with parameters that broadcast to the shape.
WITH_PARAMETERS = """
    StatelessRandomGammaV2 StatelessRandomBinomial StatelessRandomPoisson
    StatelessParameterizedTruncatedNormal
"""


def draw(node: Node) -> Result:
    """A draw with the rows is of each row, one without them is for all rows."""
    if any(not each.is_plain for each in node.inputs[1:]):
        raise MixesRowsError("a seed or limit that depends on rows")
    sizes = node.inputs[0]
    if sizes.values is None and sizes.is_plain:
        return SAME
    found = node.row_axis(node.numbers(0))
    return node.add_draw(SAME if found is None else found)


def draw_with_state(node: Node) -> Result:
    """The numbers follow those that were drawn before, whatever rows these had."""
    raise MixesRowsError("numbers of one of TensorFlow's stateful generators")


def draw_with_parameters(node: Node) -> Result:
    shape, seed, *parameters = node.inputs
    if not seed.is_plain:
        raise MixesRowsError("a seed that depends on rows")
    found = None if shape.values is None else node.row_axis(node.numbers(0))
    if found is None:
        if shape.is_plain and all(each.is_plain for each in parameters):
            return SAME
        raise MixesRowsError("random numbers with parameters that depend on rows")
    rank = len(node.numbers(0)[0])
    for i, each in enumerate(parameters, 2):
        axis = found.axis - (rank - node.rank(i))
        if each.has_rows:
            if node.type == "StatelessParameterizedTruncatedNormal":
                raise MixesRowsError(
                    "random numbers that depend on the parameters of other rows"
                )
            if (each.axis, each.multiple) != (axis, found.multiple) or each.power:
                raise MixesRowsError("rows are combined with other rows")
        elif each.kind is not Kind.SAME or each.power:
            raise MixesRowsError(f"a parameter that is {each}")
        elif axis >= 0 and node.sizes(i)[axis] != 1:
            raise MixesRowsError("rows are combined with a tensor that has as many")
    return node.add_draw(found)


def gamma(node: Node) -> Result:
    """`StatelessRandomGammaV3(shape, key, counter, algorithm, alpha)`."""
    shape, *state, alpha = node.inputs
    if any(not each.is_plain for each in state):
        raise MixesRowsError("a seed that depends on rows")
    found = None if shape.values is None else node.row_axis(node.numbers(0))
    if found is None and shape.is_plain and alpha.is_plain:
        return SAME
    if found is None or alpha.power or alpha.kind is Kind.PART:
        raise MixesRowsError("random numbers with parameters that depend on rows")
    rank = len(node.numbers(0)[0])
    last = len(node.inputs) - 1
    axis = found.axis - (rank - node.rank(last))
    if alpha.has_rows and (alpha.axis, alpha.multiple) != (axis, found.multiple):
        raise MixesRowsError("rows are combined with other rows")
    if not alpha.has_rows and axis >= 0 and node.sizes(last)[axis] != 1:
        raise MixesRowsError("rows are combined with a tensor that has as many")
    return node.add_draw(found)


def choose(node: Node) -> Result:
    """`StatelessMultinomial(logits, num_samples, seed)`: choices for each row."""
    logits, *others = node.inputs
    if any(not each.is_plain for each in others) or logits.power:
        raise MixesRowsError("a seed or number of choices that depends on rows")
    if not logits.has_rows or logits.axis:
        raise MixesRowsError(f"choices by {logits}")
    return node.add_draw(logits.but(values=None, is_zero=False))


def shuffle(node: Node) -> Result:
    raise MixesRowsError("a random permutation")


RULES: dict[str, Rule] = {
    **rules(STATELESS, draw, takes_counts=True),
    **rules(STATEFUL, draw_with_state, takes_all=True),
    **rules(WITH_PARAMETERS, draw_with_parameters, takes_counts=True),
    **rules("StatelessRandomGammaV3", gamma, takes_counts=True),
    **rules("StatelessMultinomial", choose),
    **rules("StatelessShuffle", shuffle),
}
