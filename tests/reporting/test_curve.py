from overland.apps.watch.view import MARK, draw_curve

BLANK = "\u2800"


def test_a_falling_loss_falls() -> None:
    rows = draw_curve([(x, 100.0 - x) for x in range(101)], [], width=30, height=5)
    drawn = [row[9:] for row in rows[:5]]
    assert all(len(row) == 21 for row in drawn)
    first = [next(i for i, cell in enumerate(row) if cell != BLANK) for row in drawn]
    assert first == sorted(first)
    assert first[0] == 0
    assert drawn[-1][-1] != BLANK
    assert rows[0].startswith("   ")
    assert rows[0].split()[0] in ("99.5", "99", "98.5")
    assert rows[-1].split() == ["0", "100"]


def test_marks_stand_where_their_values_are() -> None:
    rows = draw_curve([(0, 1.0), (10, 1.0)], [(10, 0.0), (0, 2.0)], width=20, height=5)
    assert rows[0][9] == MARK
    assert rows[4][19] == MARK


def test_odd_input_is_drawn_or_left_out() -> None:
    assert draw_curve([], [(1, 2.0)], 40, 5) == []
    assert draw_curve([(1, float("nan"))], [], 40, 5) == []
    one = draw_curve([(5, 3.0)], [(5, float("inf")), (99, 1.0)], 40, 5)
    assert len(one) == 6
    assert MARK not in "".join(one)
    assert len(draw_curve([(1, 2.0), (2, 2.0)], [], 3, 4)) == 5  # however narrow
