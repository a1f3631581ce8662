from __future__ import annotations

import re
from pathlib import Path

from router.api import limits
from router.app import build_app
from router.config import RouterConfig
from router.text import chat_template
from tests.router.fake_backend import FakeBackend
from tests.router.smollm2 import smollm2

PAGE = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


def test_the_documented_limits_are_the_limits() -> None:
    documented = {name: float(value) for name, value in re.findall(r"^\| `([A-Z_]+)` \| (-?\d+) \|", PAGE, re.MULTILINE)}
    actual = {name: value for name, value in vars(limits).items() if name.isupper()}
    actual |= {name: getattr(chat_template, name) for name in ("OUTPUT_BYTES_MAX", "RENDER_SECONDS_MAX")}
    assert documented == actual


def test_every_route_is_documented() -> None:
    app = build_app(FakeBackend(), smollm2(), RouterConfig())
    paths = {getattr(route, "path", "").replace("{name:path}", "{id}") for route in app.routes}
    assert paths == set(re.findall(r"`(?:GET|POST) (/[^`]+)`", PAGE))
