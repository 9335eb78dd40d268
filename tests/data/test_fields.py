import numpy as np

from overland.data.lanes import IGNORED, Rows, tokens_and_labels, with_borders

# Two documents and padding; one document alone; three, the last of which is only a label.
ROWS = Rows(
    np.array([[1, 1, 2, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 3], [4, 5, 5, 5, 5, 5, 6]]),
    np.array([5, 7, 7]),
    np.array([[1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 1]], bool),
    sample=np.arange(3),
    epoch=np.zeros(3, np.int64),
)


def test_labels_are_the_next_tokens_and_padding_has_none() -> None:
    tokens, labels = tokens_and_labels(ROWS)
    assert tokens.tolist() == ROWS.tokens[:, :-1].tolist()
    assert labels.tolist() == [
        [1, 2, 2, 2, IGNORED, IGNORED],
        [3, 3, 3, 3, 3, 3],
        [5, 5, 5, 5, 5, 6],
    ]


def test_borders_take_no_loss_and_reset_positions() -> None:
    fields = with_borders(ROWS)
    assert fields.labels.tolist() == [
        [1, IGNORED, 2, 2, IGNORED, IGNORED],
        [3, 3, 3, 3, 3, 3],
        [IGNORED, 5, 5, 5, 5, IGNORED],
    ]
    assert fields.positions.tolist() == [
        [0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4]
    ]  # fmt: skip
    assert fields.documents.tolist() == [
        [0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]
    ]  # fmt: skip


def test_a_row_of_one_token_has_no_loss() -> None:
    zero, begins = np.array([0]), np.array([[True, False, False]])
    row = Rows(np.array([[7, 0, 0]]), np.array([1]), begins, zero, zero)
    for labels in (tokens_and_labels(row)[1], with_borders(row).labels):
        assert labels.tolist() == [[IGNORED, IGNORED]]
