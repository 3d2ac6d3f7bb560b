"""The viewer of belief probes: what is shown, colours, HTML, and errors that name file and line."""

from __future__ import annotations

import json

import pytest

from verl_ext.__main__ import main as verl_ext_main
from verl_ext.probe_view import as_html, in_terminal, main, read


def row(step=1, uid="a", score=1.0, **more):
    return {
        "step": step, "row": 0, "uid": uid, "prompt": "3+4=", "answer": "7", "score": score, "starts": [0, 2],
        "texts": ["so <b>", "7"], "beliefs": [0.1, 0.05, 0.9], "gains": [-0.05, 0.85], "advantages": [-0.06, 1.52],
    } | more  # fmt: skip


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in rows))
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "probe" / "1.jsonl", [row()])
    write(tmp_path / "probe" / "12.jsonl", [row(12, "b"), row(12, "c", 0.0), row(12, "bb"), row(12, "b")])
    return tmp_path


def test_a_response_reads_belief_segment_belief():
    text = in_terminal(row(), color=False)
    assert "[0.100]so <b>[0.050]7[0.900]" in text and "-0.050 -> -0.060, +0.850 -> +1.520" in text
    assert "score 1" in text and "answer 7" in text
    colored = in_terminal(row(), color=True)
    assert "\033[97;48;2;66;0;0mso <b>\033[0m" in colored  # red: it lowered the belief
    assert "\033[97;48;2;0;150;0m7\033[0m" in colored


def test_html_escapes_what_the_model_wrote():
    page = as_html([row(prompt="<script>")], "t & t")
    assert "so &lt;b&gt;" in page and "<script>" not in page and "t &amp; t" in page
    assert "rgba(200,30,30" in page and "rgba(0,140,60" in page and "advantage +1.5200" in page


def test_the_last_step_is_shown_and_choices_narrow_it(folder, capsys):
    assert verl_ext_main(["probe", str(folder)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert [line[3] for line in lines] == ["b", "c", "bb"]
    assert [line[-2:] == ["2", "times"] for line in lines] == [True, False, False]
    assert main([str(folder / "probe"), "--only", "wrong"]) == 0
    out = capsys.readouterr().out
    assert "uid c" in out and "uid b" not in out and "\033" not in out
    assert main([str(folder / "probe" / "1.jsonl"), "--uid", "a", "--html", str(folder / "out" / "x.html")]) == 0
    assert "3+4=" in (folder / "out" / "x.html").read_text()
    assert main([str(folder), "--limit", "1"]) == 0
    assert capsys.readouterr().out.count("step 12") == 1
    assert main([str(folder), "--step", "7"]) == 2
    assert "no response matches; the steps are 1 to 12" in capsys.readouterr().err


def test_other_files_are_refused(tmp_path, capsys):
    path = write(tmp_path / "3.jsonl", [{"input": "q", "output": "o", "score": 1, "uid": "a_0_0"}])
    assert main([str(path)]) == 2
    assert "3.jsonl:1: not a probe's row" in capsys.readouterr().err
    broken = (
        {"beliefs": [0.1, None, 0.9]}, {"score": "high"}, {"gains": [0.1]}, {"texts": [1, 2]}, {"uid": 3},
        {"advantages": [float("nan"), 1.0]},
    )  # fmt: skip
    for change in broken:
        assert main([str(write(tmp_path / "5.jsonl", [row(**change)]))]) == 2, change
        assert "5.jsonl:1: not a probe's row" in capsys.readouterr().err
    assert main([str(write(tmp_path / "6.jsonl", []))]) == 2
    assert "no rows" in capsys.readouterr().err
    (tmp_path / "7.jsonl").write_bytes(b"\xff\xfe")
    assert main([str(tmp_path / "7.jsonl")]) == 2
    good = str(write(tmp_path / "8.jsonl", [row()]))
    assert main([good, "--html", str(tmp_path)]) == 2
    assert "--html" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([good, "--limit", "0"])
    assert main([str(tmp_path / "nothing")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert read(write(tmp_path / "4.jsonl", [row()]))[0]["answer"] == "7"
