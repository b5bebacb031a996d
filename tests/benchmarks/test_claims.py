"""RESULTS.md, the figures that pages cite, and the chart of README.md: they say what the CSVs say."""

import os
import subprocess
import sys

import pytest

from benchmarks import charts, claims, harness, reading

RESULTS = reading.Results(harness.RESULTS)


def write(directory, name, *lines):
    (directory / f"{name}.csv").write_text("\n".join(lines) + "\n")
    return reading.Results(directory)


def test_the_pages_say_what_the_csvs_say():
    assert claims.main(["--check"]) == 0


@pytest.mark.slow
def test_every_reader_writes_the_same_pages():
    """Whatever order sets have in a process: here another one than in the process of the test before."""
    command = [sys.executable, "-m", "benchmarks.claims", "--check"]
    done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, capture_output=True)
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_every_figure_can_be_cited():
    pages = [harness.ROOT / "README.md", *(harness.ROOT / "docs").glob("*.md")]
    cited = [name for page in pages for name, _ in claims.BLOCK.findall(page.read_text())]
    assert sorted(cited) == sorted(set(cited)) and set(cited) <= claims.FIGURES.keys()


def test_values_keep_names_that_look_like_numbers(tmp_path):
    rows = write(tmp_path, "x", "# a comment", "commit,rows,gbps,met,ms", "12345678,3,1.5,yes,").rows("x")
    assert rows == [{"commit": "12345678", "rows": 3, "gbps": 1.5, "met": "yes", "ms": None}]


def test_arms_stand_side_by_side_and_missed_targets_in_brackets(tmp_path):
    results = write(
        tmp_path,
        "bags",
        "case,arm,dtype,row_bytes,sms,gbps,target_gbps,met",
        *("device,copy_,int8,2048,132,9,,", "a,raw,bfloat16,2048,132,50,,"),
        *("a,ibp,bfloat16,2048,132,150,200,no", "b,ibp,float32,128,8,7.5,7,yes"),
    )
    table = claims.Table("", "bags", "", claims.ROWS, claims.judged)
    assert table.markdown(results).split("\n") == [
        "| rows | a, BF16, 2 KiB | b, FP32, 128 B |",  # more arms than cases: an arm a line
        "| --- | --- | --- |",
        "| raw | 50.0 |  |",
        "| ibp | 150 (of 200) |  |",
        "| ibp, 8 SMs |  | 7.5 |",
    ]
    more = claims.Table("", "bags", "", claims.ROWS, claims.judged, more={"gain": claims.over("ibp", "raw")})
    assert more.markdown(results).endswith("| gain | 3.00 |  |")


def test_a_line_for_each_row_without_arms(tmp_path):
    results = write(tmp_path, "x", "case,arm,sms,ms", "a,one,0,1.5", "a,two,0,", "b,two,0,3")
    table = claims.Table("", "x", "", {"what": claims.cell("case"), "ms": claims.cell("ms", claims.real(2))})
    assert table.markdown(results).split("\n")[2:] == ["| a | 1.50 |", "| a |  |", "| b | 3.00 |"]


def test_targets_are_counted(tmp_path):
    write(tmp_path, "a", "met", "yes", "no", "")
    results = write(tmp_path, "b", "met", "yes", "yes")
    text = claims.targets(results)
    assert text.startswith("Of 4 targets, which the project set for itself, 3 are met and 1 are missed:")
    assert "| `a` | 1 | 1 |" in text


def test_a_figure_is_of_one_row(tmp_path):
    columns = "case,arm,dtype,gbps,ms,gpu"
    results = write(tmp_path, "gnn", columns, '"a, b",x,int8,12,3,H', '"a, b",y,int8,48,4,H', "c,x,int8,1,1,H")
    assert claims.cited(results, "{gnn|gbps|a, b|x}, {gnn|ms|a, b|y|dtype=int8}") == "12.0, 4.00 ms"
    assert claims.cited(results, "{gnn|gbps|a, b|y / x}") == "4.00"
    assert claims.cited(results, "{from gnn}") == "(H; [RESULTS.md](../benchmarks/RESULTS.md#graph-neural-networks))"
    with pytest.raises(ValueError, match="gnn.csv has 2 rows with {'arm': 'x'}; wanted one"):
        claims.cited(results, "{gnn|gbps||x}")


def test_blocks_of_pages_are_written_anew(monkeypatch):
    monkeypatch.setattr(claims, "FIGURES", {"a": "new", "b": lambda results: "also"})
    start = "<!-- {}: written by python -m benchmarks.claims -->\n"
    page = f"before\n{start.format('a')}old\n<!-- end of a -->\n{start.format('b')}<!-- end of b -->\nafter"
    text = claims.rewritten(page, RESULTS)
    assert text.split("\n")[2:4] == ["new", "<!-- end of a -->"] and "also\n<!-- end of b -->\nafter" in text
    assert claims.rewritten(text, RESULTS) == text
    with pytest.raises(ValueError, match="no end"):
        claims.rewritten(page.replace("end of b", "end of c"), RESULTS)


def test_nets_whose_peak_falls_on_the_device_and_nets_whose_peak_rises(tmp_path):
    results = write(
        tmp_path,
        "activations",
        "case,arm,step_ms,peak_gb,freed_gb",
        *("VGG16,plain,10,4,0", "VGG16,on the device,15,3,1", "VGG16,recomputed,13,2,2"),
        *("AlexNet,plain,10,4,0", "AlexNet,on the device,25,4.5,-0.5", "AlexNet,recomputed,12,3.5,0.5"),
    )
    assert claims.on_the_device(results) == (
        "The peak falls for 1 of 2 measured nets, most and least: VGG16 3.00 GB instead of 4.00, steps 1.5 times as "
        "long (recomputed 2.00 GB, 1.3 times); AlexNet 4.50 GB instead of 4.00, steps 2.5 times as long "
        "(recomputed 3.50 GB, 1.2 times)."
    )


def models_csv(directory, *lines):
    columns = "model,way,arm,rows,context,ms,tokens_per_s,times,device_bytes,peak_bytes,weight_bytes,token_bytes"
    lines = [f"x,H200,{line}" for line in lines]
    return write(directory, "llm", f"case,gpu,{columns}", *lines)


def test_steps_of_language_models(tmp_path):
    results = models_csv(
        tmp_path,
        *("Large,step,coded,8,512,20,400,,75,,100,1", "Small,step,plain,1,512,2,500,1.000,10,,10,1"),
        *("Small,step,coded,1,512,1.6,625,1.250,8,,10,1", "Small,compiled step,plain,16,512,2,500,1.000,10,,10,1"),
        *("Small,prefill,plain,64,,9,9,1.000,10,,10,1", "Small,step,coded,1,8192,3,400,1.100,8,,10,1"),
    )
    text, table = claims.language_models(results).split(":\n\n")
    assert text.endswith("#language-models-from-compressed-weights))")
    assert table.split("\n") == [
        "| model | batch | plain | compressed |",
        "| --- | --- | --- | --- |",
        "| Small | 1 | 2.00 | 1.60 (1.25) |",
        "| Large | 8 |  | 20.0 |",
    ]


def test_loads_of_an_engine(tmp_path):
    """Runs of an arm in both orders are averaged. A load that one arm alone has served has no line."""
    columns = "case,arm,card_gib,requests,prompt_tokens,new_tokens,order,tokens_per_s,bound_tokens_per_s,ttft_ms,"
    results = write(
        tmp_path,
        "serve_vllm",
        columns + "between_ms,kv_tokens,gpu",
        *(
            "big-random,plain,79,256,128,1024,1,900,2000,50,20,1000,H",
            "big-random,plain,79,256,128,1024,2,1100,2000,70,30,1000,H",
        ),
        *(
            "big-random,coded weights,79,256,128,1024,2,1500,3000,40,50,2500,H",
            "big-random,plain,79,1,8,8,1,5,9,9,9,9,H",
        ),
        "toy,plain,,,,,,7,,9,,,H",
    )
    text, table = claims.loads(results).split(":\n\n")
    assert text.endswith("RESULTS.md#serving-engines))")
    assert table.split("\n")[2:] == [
        "| big, 79 GiB | 256 x 128 + 1,024 | 1,000 | 1,500 | 1.50 | 1.50 | 60.0 and 40.0 | 25.0 and 50.0 "
        "| 1,000 and 2,500 |"
    ]


def test_what_freed_memory_holds(tmp_path):
    """A token takes 1 MB; a prompt of 2,048 tokens 1 GB besides its keys and values."""
    weights = {"A": (16, 12), "B": (141, 106), "C": (60, 50)}
    lines = [f"{name},weights,coded,0,,1,,,{b * 10**9},,{a * 10**9},1000000" for name, (a, b) in weights.items()]
    for name, (plain, coded) in list(weights.items())[:2]:
        for gb in (plain, coded):
            lines.append(f"{name},prefill,x,2048,,1,,,{gb * 10**9},{gb * 10**9 + 3048 * 10**6},1,1")
    lines.append("A,prefill,x,512,,1,,,1,99000000000,1,1")  # of another prompt
    text = claims.freed_memory(models_csv(tmp_path, *lines))
    assert text.split(":\n\n")[1].split("\n")[2:] == [  # C has no prompt; A is small beside 80 GB
        "| A, 16.00 and 12.00 | 24 | 7,000: 0 | 11,000: 1 | 1.6 |",
        "| B, 141.00 and 106.00 | 141 | do not fit | 34,000: 4 |  |",
    ]


def test_nets_that_pin_more_coded_are_named(tmp_path):
    results = write(
        tmp_path,
        "activations",
        "case,arm,pinned_gb,gpu",
        *("A,raw,2,H", "A,ibp,3,H", "B,raw,4,H", "B,ibp,1,H", "C,raw,1,H", "C,ibp,1,H"),
    )
    assert claims.pinned_activations(results).startswith(
        "Compressed activations pin more host memory than raw ones in 1 of 3 measured nets, in GB: A 3.00 for 2.00; "
        "least of raw B 1.00 for 4.00."
    )


def test_rows_without_a_commit_are_counted(tmp_path):
    rows = write(tmp_path, "x", "case,commit,gpu", "a,0123456789abc,H", "b,,H").rows("x")
    assert claims.machine(rows) == ", H, commit 0123456789, 1 of 2 rows name no commit"


def test_tables_and_figures_wait_for_their_csv(tmp_path):
    empty = reading.Results(tmp_path)
    assert claims.language_models(empty) == "" == claims.freed_memory(empty)
    assert claims.freed_memory(models_csv(tmp_path, "A,step,coded,1,512,1,1,,1,,1,1")) == ""
    for path in harness.RESULTS.glob("*.csv"):
        if path.name != "llm.csv":
            (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "llm.csv").unlink()
    assert "Language models" not in claims.results_page(reading.Results(tmp_path))


@pytest.mark.slow
def test_the_chart(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("gather", "llm", "moe_hits", "choose"):
        (tmp_path / f"{name}.csv").write_text((harness.RESULTS / f"{name}.csv").read_text())
    charts.draw(tmp_path)
    assert (tmp_path / "overview.png").stat().st_size > 10_000
    charts.draw_experts(tmp_path)
    assert (tmp_path / "experts.png").stat().st_size > 10_000
    charts.draw_columns(tmp_path)
    assert (tmp_path / "columns.png").stat().st_size > 10_000


def test_what_the_chart_shows():
    rows = RESULTS.rows("gather", case="citeseer")
    (kinds,) = charts.rows_of_tables(rows).values()
    assert kinds[charts.IBP] == max(row["gbps"] for row in rows if row["arm"] in ("ibp slots", "planes slots"))
    models = charts.steps_of_models(RESULTS.rows("llm"))
    steps = {"model": "Qwen3-32B", "way": "step", "rows": 1, "context": charts.CONTEXT}
    assert models["Qwen3-32B"] == {
        charts.PLAIN: RESULTS.row("llm", arm="plain", **steps),
        charts.IBP: RESULTS.row("llm", arm="coded", **steps),
    }
    assert [*models["Llama-3-70B"]] == [charts.IBP]  # its plain weights fit no GPU


def test_no_chart_without_measurements(tmp_path, capsys):
    charts.draw(tmp_path)
    charts.draw_experts(tmp_path)
    charts.draw_columns(tmp_path)
    charts.draw_maps(tmp_path)
    charts.draw_entries(tmp_path)
    said = capsys.readouterr().out
    assert (
        "no chart: " in said
        and "no chart of experts: " in said
        and "no chart of columns: " in said
        and "no chart of activations: " in said
        and "no chart of entries: " in said
        and not list(tmp_path.iterdir())
    )


def test_no_chart_of_quick_runs(tmp_path, capsys):
    for name in ("gather", "llm"):
        lines = (harness.RESULTS / f"{name}.csv").read_text().splitlines()
        few = [line for line in lines if f",{charts.ROW_BYTES}," not in line and ",device," not in line]
        (tmp_path / f"{name}.csv").write_text("\n".join(few))
    charts.draw(tmp_path)
    assert "no chart: full runs" in capsys.readouterr().out and not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("figures", [claims.sent_pages, claims.mixtures])
def test_nothing_is_said_before_it_is_measured(tmp_path, figures):
    assert figures(reading.Results(tmp_path)) == ""
