"""`python -m bench.peers`: the same as `rantang bench peers`."""

from bench.peers.cli import app

app(prog_name="python -m bench.peers")
