"""The rollout server as a user starts it: one real process with a small random model, asked by many clients at once."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.launcher.rollout import build_parser, main, settings_from
from tests.e2e import demo

MAX_PROMPT, MAX_NEW = 40, 16
READY = re.compile(r"^INFO:root:Rollout server started on port (\d+)$", re.MULTILINE)
CLUSTER = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """The demo's model, which has a tokenizer of letters and a chat template, and 64 positions."""
    return demo.prepare(tmp_path_factory.mktemp("demo")) / "model"


def command(model: Path, *options: str) -> list[str]:
    lengths = ["--max_prompt_length", str(MAX_PROMPT), "--max_new_tokens", str(MAX_NEW)]
    names = ["--model_name_or_path", str(model), "--tokenizer_name_or_path", str(model)]
    return [sys.executable, "-m", "megarl.launcher.rollout", *names, "--rollout_batch_size", "4", *lengths, "--port", "0", *options]


@dataclass
class Server:
    """A server process; its log goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    port: int = 0

    def wait_until_ready(self, deadline_s: float = 200) -> None:
        end = time.monotonic() + deadline_s
        while not (found := READY.search(self.log.read_text())):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)
        self.port = int(found[1])

    def ask(self, body: Any, headers: dict[str, str] | None = None, path: str = "/generate") -> tuple[int, dict[str, Any]]:
        """HTTP status and parsed answer; ``body`` None is a GET."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | (headers or {})
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, sent)
        try:
            with urllib.request.urlopen(request, timeout=100) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def texts(self, prompts: list[Any], **fields: Any) -> list[str]:
        status, answer = self.ask({"prompts": prompts} | fields)
        assert status == 200, answer
        return answer["sequences"]


def start(directory: Path, line: list[str]) -> Server:
    log = directory / "server.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(line, stdout=out, stderr=out, cwd=demo.ROOT)
    return Server(process, log)


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def left(processes: list[psutil.Process], seconds: float = 10) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=seconds)[1]


@pytest.fixture(scope="module")
def server(model, tmp_path_factory) -> Iterator[Server]:
    started = start(
        tmp_path_factory.mktemp("server"), command(model, "--device", "cpu", "--use_paged_attention", "true", "--block_size", "32")
    )
    try:
        started.wait_until_ready()
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class TestServer:
    pytestmark = CLUSTER

    def test_the_tutorials_request(self, server):
        status, answer = server.ask({"prompts": ["reverse: abc"]})
        assert status == 200
        (text,) = answer["sequences"]
        assert isinstance(text, str)
        assert answer["finish_reasons"][0] in ("stop", "length")
        assert 1 <= answer["num_tokens"][0] <= MAX_NEW
        assert server.ask(None, path="/health") == (200, {"status": "ok"})
        assert "vLLM always pages" in server.log.read_text()

    def test_answers_come_in_the_order_of_their_prompts(self, server):
        prompts = ["abc", chat("abc"), "d", "efghij" * 5, chat("reverse: dcba"), "a", "lkj"]
        together = server.texts(prompts, temperature=0)
        assert together == [server.texts([prompt], temperature=0)[0] for prompt in prompts]
        assert len(set(together)) > 3

    def test_messages_go_through_the_chat_template(self, server):
        rendered = "<|user|>reverse: abc<|im_end|><|assistant|>"
        assert server.texts([chat("reverse: abc")], temperature=0) == server.texts([rendered], temperature=0)
        assert server.texts(["reverse: abc"], temperature=0) != server.texts([rendered], temperature=0)

    def test_a_seed_decides_whoever_else_asks(self, server):
        prompts = [f"reverse: {word}" for word in ("abc", "abc", "lkj", "dcba", "ef")]
        alone = server.texts(prompts, seed=11)
        assert alone[0] != alone[1]  # the same prompt twice is two draws
        assert server.texts(prompts[1:2], seed=12) == alone[1:2]
        with ThreadPoolExecutor(12) as clients:
            others = [clients.submit(server.texts, [f"{'abcdefghijkl'[i % 12]}{'a' * (i % 9)}"], seed=i) for i in range(40)]
            same = [clients.submit(server.texts, prompts, seed=11) for _ in range(6)]
            assert [future.result() for future in same] == [alone] * 6
            assert all(len(future.result()) == 1 for future in others)
        assert server.texts(prompts, seed=12) != alone
        assert server.texts(prompts) != server.texts(prompts)

    def test_the_seed_of_an_answer_repeats_it(self, server):
        _, answer = server.ask({"prompts": ["abc", "abc"]})
        assert server.texts(["abc", "abc"], seed=answer["seed"]) == answer["sequences"]

    def test_lengths_and_stop_tokens_are_heeded(self, server):
        _, short = server.ask({"prompts": ["abc", "abc"], "max_new_tokens": 3, "stop_token_ids": []})
        assert (short["num_tokens"], short["finish_reasons"]) == ([3, 3], ["length", "length"])
        _, stopped = server.ask({"prompts": ["abc"], "stop_token_ids": list(range(33))})
        assert (stopped["num_tokens"], stopped["finish_reasons"]) == ([1], ["stop"])

    def test_a_bad_request_is_refused_alone(self, server):
        with ThreadPoolExecutor(4) as clients:
            sound = clients.submit(server.texts, ["abc"] * 8, seed=1)
            status, answer = server.ask({"prompts": ["abc", "a" * (MAX_PROMPT + 1)]})
            assert status == 400
            assert re.search(rf"prompts\[1\] is too long[\s\S]*{MAX_PROMPT + 1} tokens[\s\S]*from 1 to {MAX_PROMPT}", answer["error"])
            assert len(sound.result()) == 8
        assert server.ask({"prompts": ["a" * MAX_PROMPT]})[0] == 200

    @pytest.mark.parametrize(
        ("body", "status", "message"),
        [
            (b"{", 400, "no JSON"),
            ({"prompts": []}, 400, "no prompts"),
            ({"prompts": [""]}, 400, "has no token"),
            ({"promts": ["a"]}, 400, "did you mean prompts"),
            ({"prompts": ["a"], "temperature": 5}, 400, "out of range"),
            ({"prompts": [chat("\x00\U0010ffff\u202e")]}, 200, ""),
            ({"prompts": ["a"] * 2000}, 413, "too many prompts"),
            (b" " * (9 << 20), 413, "too large"),
        ],
    )
    def test_no_body_breaks_the_server(self, server, body, status, message):
        got, answer = server.ask(body)
        assert (got, server.ask(None, path="/health")[0]) == (status, 200)
        assert message in answer.get("error", "")

    def test_other_routes_and_clients_are_refused(self, server):
        assert server.ask(None, path="/generat")[0] == 404
        assert server.ask(None)[0] == 405
        assert server.ask({"prompts": ["a"]}, {"Content-Type": "text/plain"})[0] == 415
        assert server.ask({"prompts": ["a"]}, {"Host": "evil.example"})[0] == 403

    def test_a_client_that_hangs_up_frees_its_place(self, server):
        import http.client

        for _ in range(8):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
            body = json.dumps({"prompts": ["abc"] * 500, "stop_token_ids": []})
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            connection.close()
        began = time.monotonic()
        server.texts(["abc"])
        assert time.monotonic() - began < 10  # 4,000 responses of 16 tokens would take far longer

    def test_its_port_is_taken(self, server, model):
        line = [*command(model), "--port", str(server.port)]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100, cwd=demo.ROOT, check=False)
        assert done.returncode == 2
        assert f"127.0.0.1:{server.port}" in done.stderr
        assert "Loading" not in done.stderr


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_with_requests_in_flight(model, tmp_path, number):
    token = tmp_path / "token"
    token.write_text("open-sesame-open-sesame\n")
    server = start(tmp_path, command(model, "--host", "0.0.0.0", "--token_file", str(token)))
    try:
        server.wait_until_ready()
        assert server.ask({"prompts": ["abc"]})[0] == 401
        known = {"Authorization": "Bearer open-sesame-open-sesame"}
        assert server.ask({"prompts": ["abc"]}, known)[0] == 200
        assert server.ask(None, path="/health")[0] == 200
        children = descendants(server.process)
        assert children
        with ThreadPoolExecutor(6) as clients:  # 5,000 responses: more than it can give before it ends
            long = [clients.submit(server.ask, {"prompts": ["abc"] * 1000, "stop_token_ids": []}, known) for _ in range(5)]
            time.sleep(1)
            server.process.send_signal(number)
            answers = [future.result() for future in long]
        assert answers[-1][0] == 503 and "stopping" in answers[-1][1]["error"]
        assert server.process.wait(30) == 0
        assert left(children) == []
        assert "Traceback" not in server.log.read_text()
    finally:
        server.process.kill()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_a_signal_while_the_model_loads(model, tmp_path):
    server = start(tmp_path, command(model))
    try:
        end = time.monotonic() + 100
        while "Loading" not in server.log.read_text() or not descendants(server.process):
            assert time.monotonic() < end
            time.sleep(0.1)
        children = descendants(server.process)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert left(children) == []
        assert not READY.search(server.log.read_text())
    finally:
        server.process.kill()


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_engine_and_server_do_not_outlive_each_other(model, tmp_path):
    server = start(tmp_path, command(model))
    try:
        server.wait_until_ready()
        children = descendants(server.process)
        server.process.kill()
        assert left(children) == []
    finally:
        server.process.kill()
    server = start(tmp_path, command(model))
    try:
        server.wait_until_ready()
        for child in descendants(server.process):
            if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
                child.kill()
        assert server.process.wait(60) == 70
        assert "engine died" in server.log.read_text()
    finally:
        server.process.kill()


@pytest.fixture
def own_signals() -> Iterator[None]:
    """The test process gets its handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model_name_or_path", "meta-llama/Llama-2-7b-hf"], "hf download meta-llama/Llama-2-7b-hf"),
        (["--host", "0.0.0.0"], "others could reach this server"),
        (["--host", "0.0.0.0", "--token_file", "/nowhere/token"], "the token can't be read"),
        (["--token_file", os.devnull], "no token"),
        (["--temperature", "nan"], "temperature is out of range"),
        (["--port", "70000"], "no such port"),
    ],
)
@pytest.mark.usefixtures("own_signals")
def test_refusals_end_with_2_before_anything_starts(options, message, capsys, monkeypatch):
    monkeypatch.delenv("MEGARL_ROLLOUT_TOKEN", raising=False)
    assert main(["--model_name_or_path", "nowhere", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_signals")
def test_a_short_token_is_refused_and_not_shown(capsys, monkeypatch):
    monkeypatch.setenv("MEGARL_ROLLOUT_TOKEN", "swordfish")
    assert main(["--model_name_or_path", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "the token is too short" in said
    assert "swordfish" not in said


def test_the_tutorials_options():
    line = "--model_name_or_path m --rollout_batch_size 2 --max_prompt_length 512 --max_new_tokens 128 --device cuda:0"
    args = build_parser().parse_args([*line.split(), "--use_paged_attention", "true", "--block_size", "16"])
    settings = settings_from(args)
    assert (settings.tokenizer_dir, settings.max_concurrent, settings.max_tokens, settings.block_size) == ("m", 2, 640, 16)
    assert (args.port, args.host, args.use_paged_attention) == (8000, "127.0.0.1", True)
    assert build_parser().parse_args(["--model_name_or_path", "m", "--use_paged_attention"]).use_paged_attention is True
    for wrong in (["--use_paged_attention", "maybe"], ["--rollout_batch_size", "0"], ["--max_new_token", "3"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["--model_name_or_path", "m", *wrong])
