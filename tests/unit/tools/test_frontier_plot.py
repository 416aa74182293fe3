"""The picture of the frontier: what is read from its tables, and where points come to be."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.benchmarks.frontier_plot import LINE, Point, picture, steps, tables

TEXT = """
closed loop of 32

| prompts get | first token, mean, s | p50 | p99 | gap, p50, ms | p99 | longest | all done, s |
|---|--:|--:|--:|--:|--:|--:|--:|
| **Ours** | 2.52 | 0.88 | 12.46 | 161 | 723 | 5088 | 153.5 |
| Ours, target 60 ms | 5.00 | 4.00 | 12.46 | 161 | 100 | 300 | 153.5 |
| Theirs, 512 | 3.00 | 1.00 | 12.46 | 161 | 800 | 1,300 | 153.5 |

documents among chats

| prompts get | first token, mean, s | p50 | p99 | gap, p50, ms | p99 | longest | all done, s |
|---|--:|--:|--:|--:|--:|--:|--:|
| Ours | 2.52 | 0.88 | 12.46 | 161 | 723 | 5,088 | 153.5 |
"""


def test_rows_are_points_of_their_servers() -> None:
    (loop, servers), (documents, others) = tables(TEXT.splitlines())
    assert (loop, documents) == ("closed loop of 32", "documents among chats")
    assert servers == {
        "Ours": [Point("default", 723.0, 0.88), Point("target 60 ms", 100.0, 4.0)],
        "Theirs": [Point("512", 800.0, 1.0)],
    }
    assert others == {"Ours": [Point("default", 5088.0, 0.88)]}  # too few gaps for a p99


def test_longer_gaps_are_further_right_and_later_first_tokens_further_up() -> None:
    root = ElementTree.fromstring("\n".join(picture(list(tables(TEXT.splitlines())))))
    circles = [each for each in root.iter() if each.tag.endswith("circle")]
    assert len(circles) == 4
    target, default, theirs = ((float(each.get("cx", "")), float(each.get("cy", ""))) for each in circles[:3])
    assert target[0] < default[0] < theirs[0]
    assert target[1] < theirs[1] < default[1]
    assert circles[0].get("fill") == circles[1].get("fill") != circles[2].get("fill")


def test_labels_of_near_points_do_not_hide_each_other() -> None:
    near = {name: [Point(name, 700.0 + number, 0.7) for number in range(2)] for name in ("ours", "theirs", "others")}
    root = ElementTree.fromstring("\n".join(picture([("loop", near)])))
    lines = sorted(
        float(each.get("y", "")) for each in root.iter() if each.text in near and not each.get("font-weight")
    )
    assert len(lines) == 6
    assert all(after - before >= LINE for before, after in zip(lines, lines[1:], strict=False))


def test_steps_are_of_round_numbers() -> None:
    assert [round(each, 6) for each in steps(5.1)] == [0, 1, 2, 3, 4, 5]
    assert [round(each, 6) for each in steps(0.9)] == [0, 0.2, 0.4, 0.6, 0.8]
    assert [round(each, 6) for each in steps(11.9)] == [0, 2, 4, 6, 8, 10]
    assert [round(each, 6) for each in steps(20.0)] == [0, 5, 10, 15, 20]
