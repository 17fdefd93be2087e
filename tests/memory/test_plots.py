"""Pictures of memories: what they draw is what the memory does, and the legend names all of it."""

import pytest
import torch

from outeffhop.memory import HopfieldMemory, ShardedMemory, plot_energy, plot_retrieval, plots

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

ANGLE = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
PATTERNS = torch.stack([ANGLE.cos(), ANGLE.sin()], 1)
QUERIES = torch.cat([1.2 * PATTERNS[:1], 0.1 * PATTERNS[1:2]])  # the second is near x = 0
NOTHING, TO_PATTERNS = "#E69F00", "#56B4E9"


@pytest.fixture(autouse=True)
def _few_points(monkeypatch):
    monkeypatch.setattr(plots, "_POINTS", 41)
    yield
    matplotlib.pyplot.close("all")


def legend(panels):
    return [text.get_text() for text in panels[0].figure.legends[0].get_texts()]


def lines(axes, colour):
    return [line.get_xydata() for line in axes.lines if line.get_color() == colour and len(line.get_xydata()) > 1]


def test_panels_share_a_scale_and_a_legend_that_names_every_mark():
    memories = {
        "dense": HopfieldMemory(PATTERNS, 8.0, "vanilla"),
        "no-op": HopfieldMemory(PATTERNS, 8.0, "outeffhop(n=40)"),
    }
    panels = plot_energy(memories, QUERIES)
    assert [axes.get_title() for axes in panels] == ["dense", "no-op"]
    paths = ["its updates, to patterns", "its updates, to nothing"]
    assert legend(panels) == ["pattern", "no-op point", "no-op region", "query", *paths]
    # the dense memory answers both with patterns, the other one with nothing to the second
    assert [len(lines(axes, NOTHING)) for axes in panels] == [0, 1]
    (path,) = lines(panels[1], NOTHING)
    torch.testing.assert_close(torch.tensor(path[0]), QUERIES[1])
    torch.testing.assert_close(torch.tensor(path[1]), memories["no-op"](QUERIES[1]).state)
    assert torch.tensor(path[-1]).norm() < 0.01
    panels[0].figure.canvas.draw()
    assert [axes.get_xlim() for axes in panels] == [panels[0].get_xlim()] * 2


def test_without_queries_and_without_no_op():
    panels = plot_energy(HopfieldMemory(PATTERNS, 8.0, "sparse"), edge=2.0, highest=0.5)
    assert legend(panels) == ["pattern"]
    assert panels[0].get_xlim() == (-2.0, 2.0)
    assert len(panels[0].figure.axes) == 2  # and the colour bar
    assert panels[0].figure.axes[1].get_ylim()[1] == 0.5


def test_the_plane_through_two_patterns_and_zero():
    patterns = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    memory = HopfieldMemory(patterns, 1.0)
    frame = plots._Frame(memory, (2, 4))
    torch.testing.assert_close(frame.lift(frame.patterns), patterns[[2, 4]])
    assert abs(frame.patterns[0, 1]) < 1e-6 < frame.patterns[0, 0]  # the first axis leads to the first pattern
    assert frame.patterns[1, 1] > 0
    panels = plot_energy(memory, patterns[:2], plane=(2, 4))
    assert (panels[0].get_xlabel(), panels[0].get_ylabel()) == ("along pattern 2", "towards pattern 4")
    assert "query, projected" in legend(panels)


def test_retrieval_shows_the_weights_of_the_last_update():
    memory = HopfieldMemory(PATTERNS, 8.0, "outeffhop(n=40)")
    energy, weights = plot_retrieval(memory, QUERIES, steps=3)
    named = ["the pattern with the largest weight", "all other patterns", "nothing (no-op)"]
    assert legend([weights]) == [*named, "query that retrieves patterns", "query that retrieves nothing"]
    assert [text.get_text() for text in weights.get_yticklabels()] == ["query 0 → pattern 0", "query 1 → nothing"]
    widths = torch.tensor([[bar.get_width() for bar in bars] for bars in weights.containers])  # [3, Q]
    torch.testing.assert_close(widths.sum(0), torch.ones(2, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(widths[2], memory(QUERIES, 3).no_op, rtol=1e-5, atol=1e-6)
    along = torch.tensor(lines(energy, TO_PATTERNS)[0][:, 1])
    torch.testing.assert_close(along, memory(QUERIES, 3, trace=True).energy[:, 0])


def test_a_method_without_energy_or_no_op():
    panels = plot_retrieval(HopfieldMemory(PATTERNS, 8.0, "clipped"), QUERIES)
    assert [axes.get_title() for axes in panels] == ["Weights of the last update"]
    assert legend(panels) == ["the pattern with the largest weight", "all other patterns"]


@pytest.mark.parametrize(
    ("draw", "kind", "message"),
    [
        (lambda m: plot_energy(ShardedMemory.__new__(ShardedMemory)), TypeError, "memory is a ShardedMemory: expected"),
        (lambda m: plot_energy({}), ValueError, "at least one memory"),
        (lambda m: plot_energy(HopfieldMemory(torch.ones(2, 1))), ValueError, "patterns of size 1"),
        (lambda m: plot_energy(m, plane=(0, 3)), ValueError, r"plane=\(0, 3\): expected two indices of the 3"),
        (lambda m: plot_energy(m, plane=(1, 1)), ValueError, r"plane=\(1, 1\): .* lie on a line"),
        (lambda m: plot_energy(HopfieldMemory(PATTERNS, method="clipped")), ValueError, "has no energy"),
        (lambda m: plot_energy(m, QUERIES[0]), ValueError, r"queries has shape \(2,\): expected \[Q, 2\]"),
        (lambda m: plot_retrieval(m, torch.ones(3, 4)), ValueError, r"queries has shape \(3, 4\)"),
        (lambda m: plot_retrieval(m, QUERIES.repeat(30, 1)), ValueError, "queries has 60 rows: give 1 to 40"),
        (lambda m: plot_retrieval(m, QUERIES, 0), ValueError, "steps=0"),
    ],
)
def test_bad_arguments(draw, kind, message):
    with pytest.raises(kind, match=message):
        draw(HopfieldMemory(PATTERNS))


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("outeffhop._naming.import_module", missing)
    with pytest.raises(ImportError, match=r"this needs matplotlib: pip install 'outeffhop\[lab\]'"):
        plot_energy(HopfieldMemory(PATTERNS))
