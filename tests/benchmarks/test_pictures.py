"""The benchmark of pictures, on a model of two narrow layers."""

from __future__ import annotations

import pytest
import typer

from benchmarks.pictures import main


def rows(capsys: pytest.CaptureFixture[str], counts: str, side: int) -> list[list[float]]:
    main(counts, side, max_tokens=3, repeats=1, device="cpu", shape="tiny")
    lines = capsys.readouterr().out.splitlines()
    return [[float(one) for one in line.split("│")[1:-1]] for line in lines if "│" in line]


@pytest.mark.slow
def test_pictures_have_the_tokens_of_their_sides(capsys: pytest.CaptureFixture[str]) -> None:
    text, one, both = rows(capsys, "0,1,2", 64)
    (large,) = rows(capsys, "1", 128)
    assert [found[0] for found in (text, one, both, large)] == [0, 1, 2, 1]
    assert large[1] - one[1] == 16 - 4
    assert both[1] - one[1] > 4
    assert min(*text[2:4], *one[2:4], *both[2:4], *large[2:4]) > 0


def test_a_shape_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        main(shape="huge")
    assert "qwen3-vl-8b, tiny" in capsys.readouterr().err
