"""The page in a browser, headless: it loads nothing, and says what the files say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.shared.models import captured
from hetconv.autotune.report.page import write_report
from hetconv.planner.make_plan import make_plan
from hetconv.schemas.cluster_profile import ClusterProfile
from tests.nets import Chain, plan_of

from .made import cluster, measured, plan

pytest.importorskip("torchvision", exc_type=Exception)
sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")

MAX_BYTES = 5_000_000
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
MANY = "/".join(("8xA100-SXM4-80GB",) * 3 + ("8xV100-SXM2-32GB",) * 4 + ("8xT4",))
CASES: dict[str, tuple[str, int, dict[str, Any], tuple[str, ...] | None]] = {
    "ResNet-50": ("ResNet-50", 64, {"devices": "L4,T4"}, None),
    "U-Net": ("U-Net", 16, {"devices": "L4,L4@0.5,T4"}, None),
    "64 devices": (
        "U-Net",
        1024,
        {"devices": MANY, "link": "nvlink3", "between": "infiniband-400g"},
        ("sample",),  # of which a plan is found in a few seconds
    ),
}


@dataclass(frozen=True)
class Made:
    """A page, and the documents of the files that it is about."""

    path: Path
    profile: dict[str, Any]
    plan: dict[str, Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Makes the page of a case, once."""
    known: dict[str, Made] = {}

    def of(case: str) -> Made:
        if case not in known:
            model, batch, named, kinds = CASES[case]
            graph = captured(model, batch)
            profile = measured(ClusterProfile.from_devices(**named), graph)
            folder = tmp_path_factory.mktemp("report")
            made_plan = make_plan(graph, profile, kinds=kinds)  # type: ignore[arg-type]
            made_plan.save(folder / "plan.json")
            profile.save(folder / "cluster.json")
            write_report(folder / "report.html", profile, made_plan)
            documents = (
                json.loads((folder / name).read_text())
                for name in ("cluster.json", "plan.json")
            )
            known[case] = Made(folder / "report.html", *documents)
        return known[case]

    return of


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api.expect.set_options(timeout=60_000)  # guards against hanging alone
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@contextmanager
def opened(browser: Any, path: Path, **options: Any) -> Iterator[Any]:
    """Opens a page; it must leave the console empty, and load nothing but itself."""
    page = browser.new_page(**({"viewport": WIDE} | options))
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url))
    page.goto(path.as_uri())
    yield page
    assert wrong == [path.as_uri()]
    page.close()


def draw_all(page: Any) -> int:
    """Brings every figure into view until it is drawn, and returns how many there are."""
    figures = page.locator("figure").all()
    for figure in figures:
        figure.scroll_into_view_if_needed()
        figure.locator(".plot .main-svg").first.wait_for(timeout=60_000)
    return len(figures)


def rows_of(page: Any, table: str) -> list[list[str]]:
    """The text of a table's visible rows."""
    found: list[list[str]] = page.evaluate(
        """(id) => [...document.querySelectorAll(`#${id} table.sortable > tbody`)]
            .filter((tbody) => !tbody.hidden)
            .map((tbody) => [...tbody.rows[0].cells].map((c) => c.textContent.trim()))""",
        table,
    )
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_small_loads_nothing_and_fits_a_phone(
    case: str, made: Callable[[str], Made], browser: Any
) -> None:
    page_file = made(case).path
    assert page_file.stat().st_size <= MAX_BYTES
    with opened(browser, page_file, viewport=PHONE) as page:
        assert draw_all(page) >= 3
        for viewport in (PHONE, WIDE):
            page.set_viewport_size(viewport)
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width == viewport["width"]


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_layers_are_those_of_the_files(
    case: str, made: Callable[[str], Made], browser: Any
) -> None:
    files = made(case)
    layers, world = files.plan["layers"], len(files.plan["devices"])
    with opened(browser, files.path) as page:
        shown, usage = rows_of(page, "layers"), rows_of(page, "usage")
        name = next(name for name, x in layers.items() if len(x["alternatives"]) > 1)
        page.get_by_role("button", name=name, exact=True).click()
        others = page.locator(".detail table").nth(1).locator("tbody tr")
        others.first.wait_for()
        because = [cell.all_inner_texts() for cell in others.locator("td").all()]
    assert [cells[0] for cells in shown] == [*layers]
    for cells, layer in zip(shown, layers.values(), strict=True):
        both = zip(layer["forward_s"], layer["backward_s"], strict=True)
        seconds = [a + b for a, b in both]
        times = seconds if world <= 4 else [max(seconds), sum(seconds) / world]
        assert cells[1].split()[-1] == layer["split"]["kind"]
        assert cells[3:] == [
            *(f"{s * 1e3:.2f}" for s in times),
            f"{layer['sent_bytes'] / 1e6:.2f}",
            f"{max(layer['memory_bytes']) / 1e6:.2f}",
        ]
    predicted = files.plan["predicted"]
    assert [cells[1] for cells in usage] == [
        f"{s * 1e3:.2f}" for s in predicted["compute_s"]
    ]
    considered = layers[name]["alternatives"]
    assert len(because) == 5 * len(considered)
    assert because[3::5] == [[f"{c['slower_by_s'] * 1e3:.3f}"] for c in considered]


def test_tables_are_sorted_and_searched_from_the_keyboard(
    made: Callable[[str], Made], browser: Any
) -> None:
    files = made("ResNet-50")
    with opened(browser, files.path) as page:
        head = page.locator("#layers thead th", has_text="MB moved")
        names = [cells[0] for cells in rows_of(page, "layers")]
        for order, reverse in (("ascending", False), ("descending", True)):
            head.get_by_role("button").press("Enter")
            assert head.get_attribute("aria-sort") == order
            moved = [float(cells[-2]) for cells in rows_of(page, "layers")]
            assert moved == sorted(moved, reverse=reverse)
            assert len(set(moved)) > 1
        page.locator("#layers thead th button").first.press("Enter")
        assert head.get_attribute("aria-sort") is None
        assert [cells[0] for cells in rows_of(page, "layers")] == sorted(names)

        page.get_by_placeholder("layer or kind").fill("LAYER1 conv2")
        assert [cells[0] for cells in rows_of(page, "layers")] == [
            f"layer1.{k}.conv2" for k in range(3)
        ]
        found = f"3 of {len(names)}"
        assert page.locator("#layers output").text_content() == found
        page.get_by_placeholder("layer or kind").fill("nothing")
        assert rows_of(page, "layers") == []


def test_the_timeline_is_zoomed_from_the_keyboard_and_adds_up(
    made: Callable[[str], Made], browser: Any
) -> None:
    files = made("U-Net")
    predicted = files.plan["predicted"]
    with opened(browser, files.path) as page:
        figure = page.locator("#timeline-figure")
        draw_all(page)
        busy = figure.locator(".plot").evaluate(
            """(plot) => { const spent = {};
                const computes = plot.data.find((trace) => trace.name === "computes");
                computes.y.forEach((y, k) => {
                  const rank = Math.round(y);
                  spent[rank] = (spent[rank] ?? 0) + computes.x[k];
                });
                return Object.values(spent); }"""
        )
        step = f"of {predicted['step_s'] * 1e3:.5g} ms"
        said = page.locator("#timeline-range")
        assert step in said.inner_text()
        before = said.inner_text()
        for name in ("Zoom in", "Later →", "← Earlier", "Zoom out"):
            page.locator("#timeline .tools").get_by_role("button", name=name).press(
                "Enter"
            )
            sync_api.expect(said).not_to_have_text(before)
            before = said.inner_text()
        page.locator("[data-zoom=all]").press("Enter")
        sync_api.expect(said).to_contain_text(f"0.0000 to {step[3:-3]}")
        page.locator("#timeline-numbers summary").press("Enter")
        operators = page.locator("#timeline-numbers tbody tr")
        operators.first.wait_for()
        count = operators.count()
    timeline = files.plan["timeline"]
    assert count == len(timeline["forward"]) + len(timeline["backward"])
    for shown, expected in zip(busy, predicted["compute_s"], strict=True):
        # What is nearer than a pixel is one bar, which may bridge what lies between.
        assert shown == pytest.approx(expected * 1e3, rel=0.05)


def test_a_curve_is_picked_and_its_numbers_are_the_profile_s(
    made: Callable[[str], Made], browser: Any
) -> None:
    files = made("U-Net")
    with opened(browser, files.path) as page:
        draw_all(page)
        options = page.locator("#curve option").all_text_contents()
        page.locator("#curve").select_option(index=3)
        figure = page.locator("#curves figure")
        sync_api.expect(figure).to_have_attribute("data-drawn", "curves-3")
        sync_api.expect(figure.locator("figcaption")).to_contain_text(options[3])
        figure.locator("summary").press("Enter")
        figure.locator("tbody tr").first.wait_for()
        numbers = [
            row.locator("td").all_inner_texts()
            for row in figure.locator("tbody tr").all()
        ]
    assert len(options) == len(files.profile["devices"][0]["operators"])
    shown, axis = options[3].split(", by ")
    curves = [
        model["forward"]
        for key, model in files.profile["devices"][0]["operators"].items()
        if key.startswith(shown) and key.endswith(axis)
    ]
    expected = [
        [float(f"{share * 100:.6g}"), float(f"{s * 1e3:.6g}")]
        for curve in curves
        for share, s in zip(curve["shares"], curve["seconds"], strict=True)
    ]
    of_first = [row for row in numbers if row[0].endswith("0: L4, forward")]
    assert [[float(x) for x in row[1:]] for row in of_first] == expected


def test_it_is_dark_where_the_system_is(
    made: Callable[[str], Made], browser: Any
) -> None:
    with opened(browser, made("U-Net").path, color_scheme="dark") as page:
        figures = draw_all(page)
        for scheme, paper in (
            ("dark", "rgb(18, 22, 28)"),
            ("light", "rgb(255, 255, 255)"),
        ):
            page.emulate_media(color_scheme=scheme)
            drawn = page.locator("figure .plot .main-svg:first-child")
            assert drawn.count() == figures
            for sheet in (page.locator("body"), *drawn.all()):
                sync_api.expect(sheet).to_have_css("background-color", paper)


def test_nothing_is_sent_anywhere_and_a_finger_scrolls(
    made: Callable[[str], Made], browser: Any
) -> None:
    """Plotly offers to share a figure with its maker's server."""
    with opened(browser, made("U-Net").path) as page:
        draw_all(page)
        titles = [
            b.get_attribute("data-title") for b in page.locator(".modebar-btn").all()
        ]
        assert titles
        assert not [title for title in titles if title and "Share" in title]
    phone = {"viewport": PHONE, "has_touch": True, "is_mobile": True}
    with opened(browser, made("U-Net").path, **phone) as page:
        draw_all(page)
        modes = page.evaluate(
            "[...document.querySelectorAll('figure .plot')].map((p) => p.layout.dragmode)"
        )
        assert set(modes) == {False}


def test_names_are_shown_as_they_are(tmp_path: Path, browser: Any) -> None:
    hostile = "<img src=x onerror=a()>"
    bare = plan()
    layers = {f"</script>{hostile}{{{{ 7 * 7 }}}}": bare.layers["two"]}
    names = (hostile, "b")
    hostile_plan = replace(bare, devices=names, model=hostile, layers=layers)
    write_report(tmp_path / "report.html", cluster(*names), hostile_plan)
    with opened(browser, tmp_path / "report.html") as page:
        draw_all(page)
        assert page.locator("h1").inner_text() == hostile
        assert rows_of(page, "layers")[0][0] == next(iter(layers))
        assert page.locator("img").count() == 0
        labels = page.locator("#timeline-figure .ytick").all_text_contents()
        assert labels == [f"0: {hostile}", "1: b"]


def test_profiles_alone_and_plans_by_hand_have_a_page(
    tmp_path: Path, browser: Any
) -> None:
    by_hand = plan_of(Chain(), plan().splits, 2)
    for k, about in enumerate(((cluster("a"),), (cluster("cpu", "cpu"), by_hand))):
        write_report(tmp_path / f"{k}.html", *about)
        with opened(browser, tmp_path / f"{k}.html") as page:
            draw_all(page)
            links = page.locator("nav a").evaluate_all(
                "(all) => all.map((a) => a.hash)"
            )
            assert page.locator(", ".join(links)).count() == len(links)
            assert (page.locator("#plan").count() == 1) == (len(about) == 2)
