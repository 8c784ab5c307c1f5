"""The HTML report: self-contained, well-formed, and with the numbers of the results."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import matplotlib as mpl
import pytest
from msgspec import structs
from rich.console import Console

from prism_replay.metrics import summarize
from prism_replay.report.console import LiveProgress, print_results
from prism_replay.report.page import rate_rows, render
from prism_replay.report.plots import all_plots
from prism_replay.report.series import OTHERS
from prism_replay.report.theme import (
    HALF,
    MARKERS,
    RC,
    legend_below,
    log_x,
    log_y,
    new_axes,
    to_svg,
)
from prism_replay.results import (
    Counters,
    DeviceMemory,
    PlacementChange,
    ReplayResults,
    RunConfig,
    StatusSample,
)
from tests.replay.records import a_record

NASTY = '<b>$x_1$ & "m"'


class Page(HTMLParser):
    """Parser that collects the loads of a browser, element ids, and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name in {"src", "href", "data", "action", "poster", "xlink:href", "srcset"}:
                self.loads.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def results(
    models: int = 2, scales: tuple[float, ...] = (0.5, 1.0), **fields: object
) -> ReplayResults:
    records = [
        a_record(number, f"m{number % models}", **({"ttft_ms": 60.0 + number} | fields))
        for number in range(40)
    ]
    samples = [
        StatusSample(
            float(second),
            {f"m{number}": second << 20 for number in range(models)},
            second << 20,
            1 << 30,
            Counters(maps=7 * second, unmaps=6 * second),
        )
        for second in range(41)
    ]
    counters = samples[-1].counters
    summary = summarize(records, scales, 40.0, counters)
    config = RunConfig(trace="test.jsonl", url="http://h:1", requests=40, slo_scales=scales)
    return ReplayResults(config, records, samples, counters, summary)


def test_the_progress_says_over_how_many_answers_its_attainment_is() -> None:
    progress = LiveProgress(Console(file=io.StringIO()), 60, 1.0)
    assert progress.state.endswith("within SLO -")
    for number in range(60):
        progress.done(a_record(number, ttft_ms=500.0 if number < 20 else 50.0))
    assert progress.state == "sent 0, done 60 of 60, errors 0, last 50 within SLO 80.0 %"


def test_nothing_is_fetched() -> None:
    html = render(results())
    page = Page(html)
    assert all(reference.startswith("#") for reference in page.loads)
    assert all(ref.startswith("#") for ref in re.findall(r"url\(['\"]?([^)'\"]*)", html))
    assert not re.search(r"@import|//[a-z0-9.-]+\.[a-z]{2,}", html)
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed"}


def test_ids_are_unique_and_references_resolve() -> None:
    html = render(results())
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    references = set(re.findall(r"url\(#([^)]*)\)", html)) | {ref[1:] for ref in page.loads}
    assert references
    assert references <= set(page.ids)


def test_the_numbers_are_on_the_page() -> None:
    found = results()
    text = Page(render(found)).text
    # TTFT runs from 60 to 99 ms: all within 100 ms, none within 50 ms
    assert found.summary.total.attainment["1"].all == 1.0
    for number in ("100.0 %", "0.0 %", "80 ms", "97 ms", "5.0 tok/s", "420/min", "360/min"):
        expected = number if number != "420/min" else f"{7 * 40 / 40 * 60:.0f}/min"
        assert expected in text
    assert "40 requests" in text


def test_throughput_and_normalised_latency_are_on_the_page_and_the_terminal() -> None:
    records = [
        a_record(0, arrival_s=1.0, e2e_ms=4000.0, output_tokens=30),
        a_record(1, arrival_s=9.0, e2e_ms=1000.0, output_tokens=5),
    ]
    summary = summarize(records, (1.0,), 20.0, None, {"good": 2000.0})
    config = RunConfig(trace="t", url="u", requests=2)
    found = ReplayResults(config, records, [], None, summary)
    cells = ["0.10", "0.40", "1.75", "7.00", "5.0 s", "1.25"]
    assert rate_rows(found) == [["good", *cells], ["total", *cells]]
    console = Console(record=True, width=80, file=io.StringIO())
    print_results(console, found)
    assert "good" + "".join(cells) in Page(render(found)).text
    (line,) = re.findall(r"good .* 5\.0 s .*", console.export_text())
    assert line.replace("│", "").split() == ["good", *" ".join(cells).split()]


def texts_of(svg: str) -> list[str]:
    return ["".join(node.itertext()) for node in ET.fromstring(svg).iter("text")]


def test_a_single_tpot_near_0_does_not_take_the_axis() -> None:
    records = [a_record(number, tpot_ms=0.0 if number == 0 else 20.0) for number in range(40)]
    summary = summarize(records, (1.0,), 40.0, None)
    config = RunConfig(trace="t", url="u", requests=40)
    texts = texts_of(all_plots(ReplayResults(config, records, [], None, summary))["tpot"])
    assert "20" in texts
    assert not {"0.01", "0.1", "1"} & set(texts)


def test_the_page_says_which_tokens_a_rate_counts() -> None:
    text = " ".join(Page(render(results())).text.split())
    assert "output tokens5.0 tok/s" in text
    assert "Output tokens: 5.0/s. Output tokens and the prompts of finished requests: 15.0" in text
    assert "“tok/s” counts output tokens" in text


def test_no_legend_lies_on_lines() -> None:
    found = all_plots(results())
    for name in ("maps", "scales"):
        plot = ET.fromstring(found[name])
        groups = {node.get("id"): [*node] for node in plot.iter("g")}
        assert f"{name}-legend_1" in groups
        inside = {child.get("id") for child in groups[f"{name}-axes_1"]}
        assert f"{name}-legend_1" not in inside


def test_rows_of_plots_are_full() -> None:
    """Counts figures of half the width: the last one is wide where their number is odd."""
    for scales in ((1.0,), (0.5, 1.0)):
        plots = all_plots(results(scales=scales))
        wide = [name for name, svg in plots.items() if 'class="wide"' in svg]
        assert wide == (["maps"] if len(plots) % 2 else [])
        assert (len(plots) - len(wide)) % 2 == 0
    assert "auto-flow dense" in render(results())


def test_a_wide_figure_has_a_narrow_form() -> None:
    plot = ET.fromstring(all_plots(with_devices(results()))["devices"])
    widths = {
        svg.get("class"): float((svg.get("viewBox") or "").split()[2])
        for svg in plot.findall("svg")
    }
    assert widths["narrow"] == widths["wide"] / 2 == pytest.approx(72 * HALF[0])


@pytest.mark.parametrize(("labels", "columns"), [(6, 6), (7, 4), (3, 3), (13, 5)])
def test_rows_of_a_legend_are_of_equal_length(labels: int, columns: int) -> None:
    with mpl.rc_context(RC):
        figure, axes = new_axes("t", "x", "y", HALF)
        for number in range(labels):
            axes.plot([0, 1], [0, number], label=f"m{number}")
        legend_below(figure, 6)
    assert figure.legends[0]._ncols == columns


def test_long_names_in_a_legend_fit_the_page() -> None:
    with mpl.rc_context(RC):
        figure, axes = new_axes("t", "x", "y", HALF)
        for number in range(4):
            axes.plot([0, 1], [0, 1], label=f"organization/model-{number}-with-a-long-name")
        legend_below(figure, 4)
        figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


def test_every_figure_is_well_formed_and_has_units() -> None:
    plots = all_plots(results())
    assert list(plots) == ["attainment", "scales", "ttft", "tpot", "arrivals", "memory", "maps"]
    for name, svg in plots.items():
        texts = " ".join(texts_of(svg))
        assert re.search(r"\((ms, log|s|%)\)", texts), name
    assert "MiB" in plots["memory"]


@pytest.mark.parametrize(("low_ms", "high_ms"), [(60, 99), (1, 100_000), (210, 390)])
def test_log_axes_have_labels_without_markup(low_ms: int, high_ms: int) -> None:
    with mpl.rc_context(RC):
        figure, axes = new_axes("t", "ms", "s", HALF)
        axes.plot([low_ms, high_ms], [low_ms, high_ms])
        log_x(axes)
        log_y(axes)
        svg = to_svg(figure, "t")
    texts = texts_of(svg)
    ticks = [text for text in texts if text not in ("t", "ms", "s")]
    assert len(ticks) >= 2
    assert all(re.fullmatch(r"[\d.e+]+", text) for text in ticks), ticks


def test_colours_are_left_to_the_page_for_dark_and_light() -> None:
    html = render(results())
    assert "prefers-color-scheme: dark" in html
    for name, marker in MARKERS.items():
        assert marker not in html
        # each once for light and once for dark
        assert len(re.findall(rf"--{name}: #", html)) == 2


def test_model_names_are_escaped() -> None:
    found = results()
    records = [a_record(0, NASTY)]
    summary = summarize(records, (1.0,), 1.0, None)
    config = RunConfig(trace=NASTY, url="u", requests=1)
    page = Page(render(ReplayResults(config, records, found.samples, None, summary)))
    assert "b" not in page.tags
    assert NASTY in page.text


def test_more_models_than_colours_are_grouped() -> None:
    plots = all_plots(results(models=20))
    assert OTHERS in plots["arrivals"]
    assert OTHERS in plots["memory"]
    assert "m19" in plots["attainment"]


def with_devices(found: ReplayResults) -> ReplayResults:
    """Returns the results with the memory of two devices and three changes."""
    samples = [
        structs.replace(
            sample,
            devices={
                "host:0": DeviceMemory(1 << 30, {"m0": 100 << 20}, {"m0": sample.kv_bytes["m0"]}),
                "host:1": DeviceMemory(1 << 29, {"m1": 5 << 20, NASTY: 1 << 20}, {"m1": 0}),
            },
        )
        for sample in found.samples
    ]
    changes = [
        PlacementChange(3.0, "activate", "m0", "host:0", seconds=0.5),
        PlacementChange(9.0, "migrate", "m1", "host:0", "host:1", "relief"),
        PlacementChange(12.0, "drop_copy", "gone", "host:1"),
    ]
    return structs.replace(found, samples=samples, changes=changes)


def test_the_memory_of_each_device_replaces_the_total() -> None:
    found = with_devices(results())
    plots = all_plots(found)
    assert "memory" not in plots
    texts = texts_of(plots["devices"])
    assert {"host:0 (GiB)", "host:1 (MiB)", "m0", "m1", NASTY, "activate", "evict"} <= set(texts)
    page = Page(render(found))
    assert "plot-devices" in page.ids
    assert "b" not in page.tags


def test_more_devices_than_a_plot_has_keep_the_total() -> None:
    memory = DeviceMemory(1 << 30, {"m0": 1 << 20}, {"m0": 1 << 20})
    found = results()
    devices = {f"host:{number}": memory for number in range(12)}
    samples = [structs.replace(sample, devices=devices) for sample in found.samples]
    plots = all_plots(structs.replace(found, samples=samples))
    assert "the first 8 of 12 devices" in plots["devices"]
    assert "memory" in plots


def test_a_long_run_has_a_plot_of_limited_size() -> None:
    found = with_devices(results())
    samples = [structs.replace(found.samples[0], t_s=float(second)) for second in range(36_000)]
    changes = [structs.replace(found.changes[0], t_s=float(second)) for second in range(5_000)]
    plot = all_plots(structs.replace(found, samples=samples, changes=changes))["devices"]
    assert len(plot) < 1_000_000


@pytest.mark.parametrize(
    ("fields", "absent"),
    [
        ({"slo_ttft_ms": None, "slo_tpot_ms": None, "slo_e2e_ms": None}, "attainment"),
        ({"error": "timeout", "ttft_ms": None, "tpot_ms": None, "e2e_ms": None}, "tpot"),
    ],
)
def test_figures_without_data_are_left_out(fields: dict[str, object], absent: str) -> None:
    found = results(**fields)
    assert absent not in all_plots(found)
    assert f'id="plot-{absent}"' not in render(found)


def test_an_interrupted_run_and_an_empty_one_say_so() -> None:
    config = RunConfig(trace="t", url="u", requests=9, interrupted=True)
    empty = ReplayResults(config, [], [], None, summarize([], (1.0,), 0.1, None))
    assert "Interrupted: partial results, 0 of 9" in Page(render(empty)).text


def test_the_same_results_give_the_same_page() -> None:
    assert render(results()) == render(results())
