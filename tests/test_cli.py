"""The command line: every option reaches its config, invalid values are refused with a remedy."""

import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from saccade.cli import app as cli
from saccade.cli import serve
from saccade.cli.chat import split_question
from saccade.cli.options import size_in_bytes
from saccade.config import EngineConfig, MediaLimits, ServeConfig, VisionCache
from tests.parity.oracle import picture


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, arguments)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServeConfig]]:
    """Collects what `saccade serve` would start."""
    calls: list[tuple[EngineConfig, ServeConfig]] = []

    def record(engine: EngineConfig, config: ServeConfig) -> int:
        calls.append((engine, config))
        return 0

    monkeypatch.setattr(serve, "run_server", record)
    return calls


def test_serve_without_options_is_the_config_without_options(
    started: list[tuple[EngineConfig, ServeConfig]],
) -> None:
    assert run("serve").exit_code == 0
    assert started == [(EngineConfig(model="embedded"), ServeConfig())]


# Every option with a value that is not its default, and the field it must reach.
ENGINE_OPTIONS = {
    "device": ("cpu", "cpu"),
    "dtype": ("float16", "float16"),
    "load-format": ("dummy", "dummy"),
    "max-model-len": ("100", 100),
    "max-num-seqs": ("3", 3),
    "max-num-batched-tokens": ("64", 64),
    "max-queue": ("5", 5),
    "max-queue-bytes": ("1GiB", 1 << 30),
    "block-size": ("8", 8),
    "num-blocks": ("99", 99),
    "gpu-memory-utilization": ("0.5", 0.5),
    "kv-cache-bytes": ("2GiB", 2 << 30),
    "kv-cache-dtype": ("fp8", "fp8"),
    "kv-vision-dtype": ("int8", "int8"),
    "kv-vision-share": ("0.25", 0.25),
    "kv-vision-views": ("global", "global"),
    "vision-cache": ("gpu=0,host=1GiB", VisionCache(gpu=0, host=1 << 30)),
    "prefix-caching": (None, False),
    "pin-prefix": (__file__, (Path(__file__).read_text(encoding="utf-8"),)),
    "pinned-prefix-bytes": ("1MiB", 1 << 20),
    "swap-bytes": ("3MiB", 3 << 20),
    "overlap": (None, False),
    "itl-target": ("12.5", 12.5),
    "quantization": ("decoder=fp8,head=none", "decoder=fp8,head=none"),
    "kernels": ("torch", "torch"),
    "graphs": ("off", "off"),
    "early-launch": ("off", "off"),
    "tuning": ("off", "off"),
    "deterministic": (None, True),
    "seed": ("4", 4),
    "step-log": ("steps.jsonl", "steps.jsonl"),
}


def test_the_table_above_has_every_engine_option() -> None:
    names = {field.name.replace("_", "-") for field in fields(EngineConfig)}
    assert names - {"model"} == set(ENGINE_OPTIONS)


@pytest.mark.parametrize("name", ENGINE_OPTIONS)
def test_engine_option_reaches_its_config(started: list[tuple[EngineConfig, ServeConfig]], name: str) -> None:
    text, value = ENGINE_OPTIONS[name]
    switch = f"--{name}" if value is True else f"--no-{name}"
    words = [switch] if text is None else [f"--{name}", text]
    result = run("serve", "somewhere", *words)
    assert result.exit_code == 0, result.output
    engine, _ = started[0]
    assert engine.model == "somewhere"
    assert getattr(engine, name.replace("-", "_")) == value


def test_server_and_media_options_reach_their_configs(
    started: list[tuple[EngineConfig, ServeConfig]], tmp_path: Path
) -> None:
    words = "--host 0.0.0.0 --port 0 --api-key a --api-key b --served-model-name m --max-body-bytes 1MiB"
    words += " --request-timeout 9 --read-timeout 7 --shutdown-timeout 2 --slow-request-seconds 4"
    words += " --reasoning-parser think --tool-parser hermes"
    words += " --limit-mm-per-prompt image=2,video=0 --max-image-pixels 1000"
    words += " --allowed-media-domains x.example --media-fetch-timeout 3"
    assert run("serve", *words.split(), "--allowed-local-media-path", str(tmp_path)).exit_code == 0
    media = MediaLimits(
        images_per_prompt=2,
        videos_per_prompt=0,
        max_pixels=1000,
        allowed_domains=("x.example",),
        allowed_local_path=tmp_path,
        fetch_timeout=3.0,
    )
    _, config = started[0]
    assert config == ServeConfig(
        host="0.0.0.0",
        port=0,
        api_keys=("a", "b"),
        served_model_names=("m",),
        max_body_bytes=1 << 20,
        request_timeout=9.0,
        read_timeout=7.0,
        shutdown_timeout=2.0,
        slow_request_seconds=4.0,
        reasoning_parser="think",
        tool_parser="hermes",
        media=media,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["--kv-cache-bytes", "lots"],
        ["--limit-mm-per-prompt", "smell=3"],
        ["--limit-mm-per-prompt", "image=-1"],
        ["--device", "abacus"],
        ["--port", "http"],
        ["--shiny"],
        ["--allowed-local-media-path", "/nowhere/at/all"],
    ],
)
def test_invalid_value_is_refused_with_the_option_named(words: list[str]) -> None:
    result = run("serve", *words)
    assert result.exit_code == 2
    assert words[0] in result.output


def test_config_errors_are_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["saccade", "serve", "--port", "99999"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "saccade: port is 99999; it must be 0 to 65535\n"


def test_the_question_is_what_is_not_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture(40, 40, 1).save(path)
    assert split_question((str(path), "What?")) == ([path], "What?")
    assert split_question((str(path),)) == ([path], None)
    assert split_question(("What?",)) == ([], "What?")
    with pytest.raises(click.UsageError, match="typo"):
        split_question(("typo.png",))
    with pytest.raises(click.UsageError, match="nofile"):
        split_question(("nofile.png", str(path), "What?"))


def test_help_shows_examples_for_every_command() -> None:
    for name in cli.COMMANDS:
        text = run(name, "--help").output
        assert "Examples:" in text
        assert f"saccade {name}" in text


def test_the_command_list_has_every_summary_and_loads_no_command() -> None:
    listed = run("--help").output
    for name, (_, summary) in cli.COMMANDS.items():
        assert name in listed
        assert summary in listed
    loaded = "import sys, saccade.cli.app as cli; cli.app(['--help'], standalone_mode=False)"
    loaded += "; print({'torch', 'fastapi', 'av'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_python_dash_m_runs_the_command() -> None:
    told = [
        subprocess.run([sys.executable, "-m", name, "serve", "--port", "x"], capture_output=True, check=False)
        for name in ("saccade", "saccade.cli.app")
    ]
    assert [one.returncode for one in told] == [2, 2]
    assert b"python -m saccade serve" in told[0].stderr
    assert told[0].stderr == told[1].stderr.replace(b"saccade.cli.app", b"saccade")


INTERRUPTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(20)
"""


def test_an_interrupt_while_modules_load_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(INTERRUPTED)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    over = subprocess.run(
        [sys.executable, "-m", "saccade", "serve"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (over.returncode, over.stderr) == (-signal.SIGINT, b"")


def test_sizes() -> None:
    assert size_in_bytes("1.5kib") == 1536
    assert size_in_bytes("2MB") == 2_000_000
    assert size_in_bytes("17") == 17
