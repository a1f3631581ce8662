"""The configuration tree: strict, one line per fault, the last source wins."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster.config import SECTIONS, Config, ConfigError, load, parse
from cluster.flags import field_of_flag, with_config_flags

ROOT = Path(__file__).resolve().parents[2]
FIELDS = [(section, field) for section, model in SECTIONS.items() for field in model.model_fields]


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "rantang.yaml"
    file.write_text(text)
    return file


def faults(tree: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(tree)  # type: ignore[arg-type]
    return caught.value.lines


FLOATS = [(section, name) for section, name in FIELDS if SECTIONS[section].model_fields[name].annotation in (float, float | None)]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(("section", "name"), FLOATS)
def test_every_number_is_finite(section: str, name: str, value: float) -> None:
    (line,) = faults({section: {name: value}})
    assert line.startswith(f"{section}.{name}: ") and "finite number" in line


def test_defaults_need_no_file() -> None:
    config = load()
    assert (config.engine.model, config.serve.port, config.serve.replicas) == ("smollm2", 8000, 2)
    assert config.model_name == "smollm2"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "engine: {max_num_seqs: 7, block_size: 32}\nserve: {port: 9000}\n")
    config = load(file, {"engine": {"max_num_seqs": "9"}, "router": {}, "serve": {}})
    assert (config.engine.max_num_seqs, config.engine.block_size, config.serve.port, config.serve.replicas) == (9, 32, 9000, 2)


def test_a_section_without_content_is_the_default(tmp_path: Path) -> None:
    assert load(written(tmp_path, "engine:\nserve:\n")) == Config()


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"engine": {"max_num_seq": 3}}, "unknown key 'engine.max_num_seq'; did you mean 'engine.max_num_seqs'?"),
        ({"servee": {}}, "unknown key 'servee'; did you mean 'serve'?"),
        ({"router": {"replicas": 2}}, "unknown key 'router.replicas'; did you mean 'serve.replicas'?"),
        ({"port": 1}, "unknown key 'port'; did you mean 'serve.port'?"),
        ({"engine": {"zzz": 3}}, "unknown key 'engine.zzz'"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_a_suggestion(tree: dict[str, object], expected: str) -> None:
    assert faults(tree) == [expected]


def test_every_fault_is_one_line_with_its_path() -> None:
    lines = faults({"engine": {"max_num_seqs": 0, "dtype": "float8"}, "serve": {"port": "http"}})
    assert len(lines) == 3
    assert [line.split(":")[0] for line in lines] == ["engine.dtype", "engine.max_num_seqs", "serve.port"]
    assert all("\n" not in line for line in lines)


def test_a_fault_of_a_file_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "engine: {max_num_seqs: -1}\n")
    with pytest.raises(ConfigError, match=r"rantang\.yaml: engine\.max_num_seqs"):
        load(file)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine: [\n", "rantang.yaml:2:1"),
        ("engine: {block_size: 3, block_size: 4}\n", "key 'block_size' is given twice"),
        ("- engine\n", "expected a mapping"),
        ("engine: 3\n", "engine: input should be a valid dictionary"),
        ("serve: !!python/object/apply:os.getpid []\n", "could not determine a constructor"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert len(caught.value.lines) == 1
    assert expected in caught.value.lines[0]
    assert "\n" not in caught.value.lines[0]


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: No such file or directory"):
        load(tmp_path / "none.yaml")


def test_api_keys_are_not_repeated_in_an_error() -> None:
    lines = faults({"router": {"api_keys": {"secret-key": 1}}})
    assert all("secret-key" not in line for line in lines)


@given(st.sampled_from(FIELDS), st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12))
def test_no_misspelled_key_passes(field: tuple[str, str], tail: str) -> None:
    section, name = field
    key = name + tail
    if key in SECTIONS[section].model_fields:
        return
    assert faults({section: {key: 1}})[0].startswith(f"unknown key '{section}.{key}'")


def test_the_tree_survives_yaml() -> None:
    config = Config()
    assert parse(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config


def test_every_field_says_what_it_is_and_has_a_flag_of_its_own() -> None:
    for section, name in FIELDS:
        assert SECTIONS[section].model_fields[name].description, f"{section}.{name} has no description"
    assert len(field_of_flag()) == len(FIELDS)


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2", "smollm2"), ("org/Some-Model", "Some-Model"), ("/nowhere/some-model/", "some-model"), ("/nowhere/file.gguf", "file")],
)
def test_the_name_in_the_api(model: str, name: str) -> None:
    assert parse({"engine": {"model": model}}).model_name == name
    assert parse({"engine": {"model": model, "served_model_name": "own"}}).model_name == "own"


def test_a_directory_is_named_by_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert parse({"engine": {"model": "."}}).model_name == "my-model"


@pytest.mark.parametrize("key", ["", " ", "secret\n", "two words", "schlüssel"])
def test_an_api_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """The empty one would be everybody's."""
    with pytest.raises(ConfigError) as raised:
        parse({"router": {"api_keys": ["good", key]}})
    (line,) = raised.value.lines
    assert line.startswith("router.api_keys: ") and "good" not in line


def test_the_readmes_configuration_is_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        assert load(file) != Config()


def test_tables_of_classes_and_tenants() -> None:
    config = parse({"router": {"classes": {"batch": {"queue_time_slo_s": 600, "floor": 0.1}}, "queue_time_slo_s": 3}}).router
    assert [(one.name, one.slo.queue_time_s, one.floor) for one in config.service_classes()] == [("standard", 3, 0.0), ("batch", 600, 0.1)]
    on_a_command_line = load(None, {"router": {"tenants": '{"acme": {"api_keys": ["k"], "weight": 2}}'}}).router
    assert on_a_command_line.tenants["acme"].weight == 2


@pytest.mark.parametrize(
    "router",
    [
        {"classes": {"Batch!": {}}},
        {"classes": {"batch": {"queue_time_slo_s": 0}}},
        {"classes": {"batch": {"queue_time_slo_s": float("inf")}}},
        {"classes": {"batch": {"slo": 3}}},
        {"classes": {"a": {"floor": 0.5}, "b": {"floor": 0.5}}},
        {"classes": {f"c{i}": {} for i in range(9)}},
        {"classes": "not json"},
        {"tenants": {"acme": {"api_keys": []}}},
        {"tenants": {"acme": {"api_keys": ["secret key"]}}},
        {"tenants": {"acme": {"api_keys": ["secret"], "weight": 0}}},
        {"tenants": {"acme": {"api_keys": ["secret"]}}, "api_keys": ["secret"]},
        {"tenants": {"acme": "secret"}},
        {"tenants": '{"acme": "secret"'},
    ],
)
def test_a_wrong_table_is_refused_and_no_key_repeated(router: dict[str, object]) -> None:
    assert not [line for line in faults({"router": router}) if "secret" in line]


@pytest.mark.parametrize("name", ["async_scheduling", "enable_prefix_caching"])
def test_a_switch_has_two_forms_also_where_it_may_be_unset(name: str) -> None:
    seen: list[dict[str, dict[str, object]]] = []

    def command(flags: dict[str, dict[str, object]]) -> None:
        seen.append(flags)

    app = typer.Typer()
    app.command()(with_config_flags(command))
    flag = name.replace("_", "-")
    for arguments in ([f"--{flag}"], [f"--no-{flag}"], []):
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [flags["engine"].get(name) for flags in seen] == [True, False, None]
