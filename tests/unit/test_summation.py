"""The fixed tree of a step: every split of the leaves gives the same expression."""

from hypothesis import given
from hypothesis import strategies as st

from convolve.summation import Leaf, Node, TreeSum, at, cover, current_leaf


def sum_leaves(leaves, count):
    """Sum leaves symbolically: a leaf is its number, a sum a pair."""
    tree = TreeSum(count, lambda left, right, first: (left, right))
    for leaf in leaves:
        tree.push(Node(leaf, 1), leaf)
    return tree


def evaluate(first, size, count):
    """The definition, read from the top."""
    if size == 1:
        return first
    half = size // 2
    left = evaluate(first, half, count)
    return left if first + half >= count else (left, evaluate(first + half, half, count))


@given(st.integers(1, 70), st.data())
def test_any_split_of_the_leaves_gives_the_same_expression(count, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=9)))
    tree = TreeSum(count, lambda left, right, first: (left, right))
    for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
        part = sum_leaves(range(start, stop), count)
        assert part.nodes == cover(range(start, stop), count)
        for node, value in zip(part.nodes, part.values, strict=True):
            tree.push(node, value)
    complete = 1 << (count - 1).bit_length()
    assert tree.nodes == [Node(0, complete)]
    assert tree.values == [evaluate(0, complete, count)]


@given(st.integers(1, 200), st.data())
def test_consecutive_leaves_end_in_few_nodes_that_cover_them_once(count, data):
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    nodes = cover(range(start, stop), count)
    covered = [leaf for first, size in nodes for leaf in range(first, min(first + size, count))]
    assert covered == list(range(start, stop))
    assert len(nodes) <= max(1, 2 * (count - 1).bit_length())


@given(st.integers(0, 5), st.integers(1, 5))
def test_aligned_powers_of_two_are_one_node(exponent, parts):
    size = 1 << exponent
    for part in range(parts):
        assert len(cover(range(part * size, (part + 1) * size), parts * size)) == 1


def test_up_to_three_leaves_are_added_from_left_to_right():
    assert [sum_leaves(range(count), count).values for count in (1, 2, 3)] == [[0], [(0, 1)], [((0, 1), 2)]]
    assert sum_leaves(range(7), 7).values == [(((0, 1), (2, 3)), ((4, 5), 6))]


def test_an_addition_names_the_first_leaf_of_its_right_side():
    firsts = []
    tree = TreeSum(6, lambda left, right, first: firsts.append(first))
    for leaf in range(6):
        tree.push(Node(leaf, 1), None)
    assert firsts == [1, 3, 2, 5, 4]


def test_the_current_micro_batch_is_known_inside_its_block_only():
    assert current_leaf() is None
    with at(Leaf(2, 5)):
        assert current_leaf() == (2, 5)
    assert current_leaf() is None
