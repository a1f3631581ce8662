"""How each peer is started: the settings of its recipe, what it notes as absent, and why it cannot run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import stack
from bench.peers import vllm
from bench.peers.home import Home, PeerError
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.main import mock_worker, ours_of
from bench.peers.registry import peer, peers
from bench.peers.vllm import Vllm, name_as_vllm
from bench.peers.work_runs import chosen_works, with_requests
from bench.stack import Stack, StackError, get_status
from bench.works import WORKS


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def install_metadata(home: Home, name: str, version: str, executable: str = "") -> None:
    """What `missing` and `version` look at, without the package."""
    folder = home.purelib(name.split("_")[0]) / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name.replace('_', '-')}\nVersion: {version}\n\nVersion: not this one?\n"
    )
    if executable:
        path = home.executable(name.split("_")[0], executable)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_nothing_installed_is_said_of_every_peer(home: Home) -> None:
    for name, one in peers(home).items():
        assert one.name == name and "not installed: python -m bench.peers install " in one.missing(home)


def test_an_unknown_peer_gets_the_list(home: Home) -> None:
    with pytest.raises(ValueError, match=r"unknown peer 'sglang'; there are vllm, vllm-default, vllm-avx512, llama.cpp, .*, or any URL"):
        peer("sglang", home)


def test_the_best_settings_of_vllm_note_what_is_absent(home: Home) -> None:
    launch = Vllm().launch(home, 9)
    assert launch.notes == ("without tcmalloc", "without iomp5") and "LD_PRELOAD" not in launch.environment
    assert launch.environment["VLLM_CPU_OMP_THREADS_BIND"].startswith("0-")
    for path in (home.folder("vllm") / "tcmalloc/usr/lib/x86/libtcmalloc_minimal.so.4", home.folder("vllm") / "env/lib/libiomp5.so"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    launch = Vllm().launch(home, 9)
    assert launch.notes == () and launch.environment["LD_PRELOAD"].count(":") == 1 and launch.environment["KMP_BLOCKTIME"] == "1"
    assert str(home.root) not in launch.command(home) and "PEERS/vllm/env/bin/vllm serve PEERS/models/" in launch.command(home)


def test_vllm_by_default_is_left_alone(home: Home) -> None:
    launch = Vllm(tuned=False).launch(home, 9)
    assert not {"LD_PRELOAD", "KMP_BLOCKTIME", "VLLM_CPU_OMP_THREADS_BIND"} & set(launch.environment)
    assert "--max-num-seqs" not in launch.argv


def test_tiles_are_kept_from_vllm_by_name_alone(home: Home) -> None:
    assert peer("vllm-avx512", home).launch(home, 9).environment["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_BF16"
    assert "ONEDNN_MAX_CPU_ISA" not in peer("vllm", home).launch(home, 9).environment


def test_vllm_cpu_is_known_by_the_name_vllm(home: Home) -> None:
    install_metadata(home, "vllm_cpu", vllm.VERSION, "vllm")
    assert Vllm().missing(home)
    for _ in range(2):  # a second installation changes nothing
        name_as_vllm(home.purelib("vllm"))
    assert Vllm().missing(home) == "" and home.version_of("vllm", "vllm") == f"{vllm.VERSION}+cpu"
    text = (home.purelib("vllm") / f"vllm-{vllm.VERSION}+cpu.dist-info" / "METADATA").read_text()
    assert text == f"Metadata-Version: 2.4\nName: vllm\nVersion: {vllm.VERSION}+cpu\n\nVersion: not this one?\n"


def test_llama_cpp_gets_a_new_connection_for_each_request_and_sends_no_ids(home: Home) -> None:
    prompts = LlamaCpp().prompts
    assert prompts.new_connections and not prompts.ask_ids and not prompts.as_text
    argv = LlamaCpp().launch(home, 9).argv
    assert str(home.gguf_bf16) in argv and argv[argv.index("-np") + 1] == "32"


def test_a_router_wants_workers(home: Home) -> None:
    install_metadata(home, "vllm_router", "0.1.17")
    source = home.purelib("vllm")
    target = home.purelib("vllm-router")
    target.parent.mkdir(parents=True)
    source.rename(target)
    assert "give it workers" in peer("vllm-router", home).missing(home)
    router = peer("vllm-router", home, ["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert router.missing(home) == "" and router.launch(home, 9).argv[-2:] == ("http://127.0.0.1:1", "http://127.0.0.1:2")


def test_a_mock_worker_lives_as_long_as_it_is_held() -> None:
    with mock_worker() as url:
        assert get_status(f"{url}/health") == 200
    assert get_status(f"{url}/health") is None


def test_a_failed_step_of_an_installation_says_which(home: Home) -> None:
    with pytest.raises(PeerError, match="exit code 3"):
        home.call([sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(PeerError, match="no-such-program"):
        home.call(["no-such-program"])


def test_other_numbers_of_requests() -> None:
    assert [work.requests for work in with_requests(WORKS[:2], "b=8")] == [WORKS[0].requests, 8]
    for wrong in ("c=1", "a", "a=0", "a=x"):
        with pytest.raises(ValueError, match="WORK=COUNT"):
            with_requests(WORKS[:2], wrong)


def test_ours_has_a_label_and_arguments() -> None:
    assert ours_of("bf16=--dtype bfloat16").name == "bf16" and ours_of("rantang=").name == "rantang"
    for wrong in ("--dtype bfloat16", "=x", "--dtype=bfloat16"):
        with pytest.raises(ValueError, match="LABEL=ARGUMENTS"):
            ours_of(wrong)


def test_settings_before_the_arguments_of_ours_go_to_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arguments: list[str], *, environment: dict[str, str]) -> Stack:
        raise StackError(f"{arguments} {environment}")

    monkeypatch.setattr(stack, "start", refuse)
    with pytest.raises(PeerError) as told, ours_of("bf16=RANTANG_CPU_ISA=avx512 --dtype bfloat16").run():
        pass
    assert str(told.value) == "['--replicas', '1', '--dtype', 'bfloat16'] {'RANTANG_CPU_ISA': 'avx512'}"


def test_works_by_letter() -> None:
    assert [work.name for work in chosen_works("e, a")] == ["a", "e"]
    for wrong in ("z", "", "a,z"):
        with pytest.raises(ValueError, match="there are a, b, c, d, e"):
            chosen_works(wrong)
