"""Plots and pages of reports. What a browser makes of a page is tested where a chromium is found."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import ibp
from helpers import embedding, make_tensor, one_hot_rows
from ibp._cli import describing, report
from native import ROOT

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">\u2028 $x_{ & {{data}}"
LIMIT_S = 60


def reports_of(count=4):
    """Reports of tables of several kinds, with a hostile name among them."""
    tensors = [
        embedding(60, 32, torch.bfloat16),
        one_hot_rows(40, 100),
        make_tensor((50, 8), torch.int64, "narrow"),
        make_tensor((9, 40), torch.uint8, "random"),
    ]
    schemes = ("planes", "planes", "ibp", "auto")
    tables = [ibp.compress(x, scheme=scheme, memory="host") for x, scheme in zip(tensors, schemes)]
    names = [HOSTILE, "model.embed.weight", "ids", "noise"]
    kinds = [report.report_table(name, table) for name, table in zip(names, tables)]
    return [kinds[i] if i < 4 else renamed(kinds[i % 4], f"layers.{i}.weight") for i in range(count)]


def renamed(found, name):
    return report.TensorContents(**{**vars(found), "name": name})


def report_of(reports, path="a<b>.safetensors"):
    before, after = report.sum_bytes(reports)
    return report.FileReport(path, "ibp", False, 1000, before, after + 700, {"by": HOSTILE}, reports)


def page_of(reports):
    return describing.make_page([report_of(reports)])


def data_text(value):
    return describing._inline(value)


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


# ---- the page ----


def test_a_page_holds_the_reports():
    reports = reports_of()
    data = data_of(page_of(reports))
    (file,) = data["files"]
    assert file["metadata"] == {"by": HOSTILE} and [t["name"] for t in file["tensors"]] == [r.name for r in reports]
    for tensor, found in zip(file["tensors"], reports):
        assert tensor["parts"] == found.parts and tensor["entropy"] == found.entropy
        assert tensor["stored_bytes"] == found.stored_bytes and tensor["shape"] == list(found.shape)
        assert ("codebook" in tensor) == bool(found.codebook)
        assert not found.codebook or data["codebooks"][tensor["codebook"]] == found.codebook


def test_text_of_a_file_is_never_markup():
    text = page_of(reports_of())
    assert "<img" not in text and text.count("<script") == 2 and text.count("</script>") == 2
    assert "a&lt;b&gt;.safetensors" in text


def test_a_page_needs_nothing_else():
    text = page_of(reports_of()[1:]).replace(data_text(HOSTILE), "")
    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?:(?!//www\.w3\.org/2000/svg")""", text)
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)[0]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'" in text


def test_a_page_of_a_large_model_is_small():
    assert len(page_of(reports_of(300)).encode()) < 600_000


def test_every_part_has_a_colour_of_its_own():
    """In light and in dark, so that the legend tells them apart."""
    script, style = describing._resource("page.js"), describing._resource("page.css")
    kinds = dict(re.findall(r'^  "?([\w ]+)"?: "(\w+)",$', script, re.MULTILINE))
    table = (ROOT / "docs" / "cli.md").read_text().partition("| part | what it is |")[2].partition("\n\n")[0]
    named = set(re.findall(r"^\| ([^|]+) \| ", table, re.MULTILINE))
    parts = {part.strip() for line in named for part in line.split(",")} - {
        "---",
        "digits of plane 0",
        "1",
        "...",
    }
    assert parts < set(kinds) and {f"digits of plane {plane}" for plane in range(4)} < set(kinds)
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for theme in (light, dark.partition("* {")[0]):
        colors = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", theme))
        taken = [colors[kind] for kind in [*kinds.values(), "amount", "other"]]
        assert len(set(taken)) == len(taken)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def browse(tmp_path):
    """Runs chromium on a page, without a window."""
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")

    def run(address, *options):
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        done = subprocess.run(
            [*command, *options, address], capture_output=True, text=True, timeout=LIMIT_S, check=True
        )
        return done.stdout

    return run


class Lines:
    """Axes that note where lines across a picture are drawn."""

    def __init__(self):
        self.at = []

    def axvline(self, x, **_):
        self.at.append(x)

    def set_xticks(self, *_, **__):
        pass

    set_xlabel = set_xticks


@pytest.mark.parametrize("name", describing.FIELDS)
def test_fields_of_floats_are_set_apart(name):
    of, axes = torch.finfo(getattr(torch, name)), Lines()
    mantissa_bits = 0
    while 2.0**-mantissa_bits > of.eps:
        mantissa_bits += 1
    describing._mark_bits(axes, name, of.bits)
    assert axes.at == [0.5, of.bits - mantissa_bits - 0.5]
    assert [field for _, field in describing.FIELDS[name]] == ["sign", "exponent", "mantissa"]


@pytest.mark.slow
def test_a_browser_shows_the_tensors(browse, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page_of(reports_of(6)), encoding="utf-8")
    shown = browse(f"file://{path}#t0", "--dump-dom")
    rows = re.findall(r'<tr tabindex="0" data-at="(-?\d+)"', shown)
    assert rows == ["-1", "0", "1", "2", "3", "4", "5"] and "6 tensors" in shown
    found = report_of(reports_of(6))
    assert f"{100 * found.savings:.1f} % saved" in shown and found.stored_bytes > sum(
        tensor.stored_bytes for tensor in found.tensors
    )
    heading = re.search(r"<h2>(.*?)</h2>", shown, re.DOTALL)[1]
    assert heading.replace("<wbr>", "").startswith("&lt;/script&gt;&lt;img") and ".<wbr>" in shown
    assert "<title>a&lt;b&gt;.safetensors</title>" in shown
    assert "residuals" in shown and "plane 0" in shown


@pytest.mark.slow
def test_a_browser_takes_a_screenshot(browse, tmp_path):
    image = pytest.importorskip("PIL.Image")
    path, shot = tmp_path / "page.html", tmp_path / "shot.png"
    path.write_text(page_of(reports_of(6)), encoding="utf-8")
    browse(f"file://{path}", f"--screenshot={shot}", "--window-size=900,700", "--hide-scrollbars")
    with image.open(shot) as picture:
        assert picture.size == (900, 700)
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)} <= colors  # kept bits and ranked symbols are drawn


# What a reader does, step by step; the names in the list, and what is opened, are noted after each.
STEPS = """
const names = () => [...document.querySelectorAll("#list tbody tr td:first-child")].map((cell) => cell.textContent);
const opened = () => document.querySelector("#detail h2").textContent;
const focused = () => document.activeElement.dataset.at || document.activeElement.id || "";
const search = document.getElementById("search");
const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const find = (text) => { search.value = text; search.dispatchEvent(new Event("input")); };
const head = (column) => document.querySelectorAll("#list th button")[column].click();
const noted = {};
const steps = [
  ["start", () => {}],
  ["search", () => { press("/"); noted.focus = focused(); find("LAYERS bfloat16"); }],
  ["escape", () => press("Escape")],
  ["sorted", () => head(0)],
  ["largest", () => head(3)],
  ["smallest", () => head(3)],
  ["down", () => { document.querySelector("#list tbody tr").focus(); press("ArrowDown"); }],
  ["next", () => press("j")],
  ["back", () => press("k")],
  ["click", () => document.querySelectorAll("#list tbody tr")[3].click()],
  ["closed", () => press("Escape")],
];
(async () => {
  for (const [name, step] of steps) {
    step();
    await new Promise((done) => setTimeout(done, 30));
    noted[name] = { names: names(), opened: opened(), open: document.body.classList.contains("open") };
  }
  const made = document.createElement("pre");
  made.id = "noted";
  made.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(noted))));
  document.body.append(made);
})();
"""


@pytest.mark.slow
def test_a_browser_searches_sorts_and_follows_keys(browse, tmp_path):
    shown_names = "layers.10.b", "layers.9.a", "ids", "noise"
    reports = [renamed(found, name) for found, name in zip(reports_of(), shown_names)]
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page_of(reports), flags=re.DOTALL)
    path = tmp_path / "page.html"
    path.write_text(text.replace("</body>", f"<script>{STEPS}</script></body>"), encoding="utf-8")
    shown = browse(f"file://{path}", "--dump-dom", "--virtual-time-budget=5000", "--window-size=1200,800")
    noted = json.loads(base64.b64decode(re.search(r'<pre id="noted">([^<]+)<', shown)[1]))
    names, by_size = [found.name for found in reports], sorted(reports, key=lambda found: found.original_bytes)
    ascending, every = [found.name for found in by_size], "in all, with headers"
    assert noted["start"] == {"names": [every, *names], "opened": "All tensors", "open": False}
    assert noted["focus"] == "search" and noted["search"]["names"] == [every, "layers.10.b"]
    assert noted["escape"]["names"] == [every, *names]
    assert noted["sorted"]["names"] == [every, "ids", "layers.9.a", "layers.10.b", "noise"]
    assert noted["largest"]["names"] == [every, *ascending[::-1]]
    assert noted["smallest"]["names"] == [every, *ascending]
    assert noted["down"]["opened"] == ascending[0] == noted["back"]["opened"] and noted["down"]["open"]
    assert noted["next"]["opened"] == ascending[1] and noted["click"]["opened"] == ascending[2]
    assert not noted["closed"]["open"]


# ---- the plot ----


def size_of(png):
    assert png.startswith(b"\x89PNG")
    return tuple(int.from_bytes(png[at : at + 4], "big") for at in (16, 20))


@pytest.mark.slow
def test_a_plot_has_a_panel_a_dtype():
    pytest.importorskip("matplotlib")
    reports = reports_of()
    width, height = size_of(describing.draw([report_of(reports, HOSTILE)]))
    one = size_of(describing.draw([report_of(reports[:1])]))
    assert width == one[0] and height > one[1]


@pytest.mark.slow
def test_a_plot_has_the_savings_of_the_file(monkeypatch):
    """As the command line and the page have them: headers count, as `ibp compress` says it."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    titles, set_title = [], axes.set_title
    monkeypatch.setattr(axes, "set_title", lambda self, text, **options: titles.append(text) or set_title(self, text))
    found = report_of(reports_of())
    describing.draw([found, found])
    assert titles[-1] == f"bytes saved: {100 * found.savings:.1f} % of all"


@pytest.mark.slow
def test_a_plot_of_many_tensors_is_one_page():
    pytest.importorskip("matplotlib")
    width, height = size_of(describing.draw([report_of(reports_of(500))]))
    assert width == 1045 and 400 < height < 3000


@pytest.mark.slow
def test_nothing_is_plotted_of_empty_tensors():
    pytest.importorskip("matplotlib")
    empty = report.report_table("empty", ibp.compress(torch.empty(0, 4), memory="host"))
    for reports in ([], [empty]):
        with pytest.raises(ValueError, match="nothing to plot"):
            describing.draw([report_of(reports)])


def test_a_plot_without_matplotlib_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        describing.draw([report_of(reports_of(1))])


@pytest.mark.parametrize(
    "name, shown",
    [("a.b", "a.b"), ("a\nb\x1b", "a\\nb\\x1b"), ("x" * 50, f"{'x' * 19}\u2026{'x' * 19}"), ("\ud800", "\\ud800")],
)
def test_names_are_drawn_in_one_line(name, shown):
    assert describing.plain(name, 40) == shown


@pytest.mark.parametrize(
    "name, lines",
    [
        ("model.norm.weight", ["model.norm.weight"]),
        ("model.layers.*.post_attention_layernorm.weight", ["model.layers.*.post_attention_", "layernorm.weight"]),
        ("x" * 40, ["x" * 36, "x" * 4]),
    ],
)
def test_long_names_part_between_words(name, lines):
    assert describing._lines(name) == lines


def test_tensors_of_a_kind_share_a_row():
    """Every tensor is in a row, and rows have names that say which; the plot of a large model has few of them."""
    (one,) = reports_of(1)
    of_layers = [renamed(one, f"layers.{layer}.{part}.weight") for layer in range(48) for part in "qkvo"]
    assert describing._labels(describing._rows(of_layers)) == [
        f"layers.*.{part}.weight (48 tensors)" for part in "qkvo"
    ]
    few = of_layers[:5]
    assert describing._rows(few) == [(report.name, [report]) for report in few]
    unlike = [renamed(one, f"{chr(97 + i % 26)}{i}") for i in range(100)]
    rows = describing._rows([*of_layers, *unlike])
    assert len(rows) == describing._MOST_ROWS and rows[-1][0] == "others"
    assert sum(len(own) for _, own in rows) == len(of_layers) + len(unlike)
