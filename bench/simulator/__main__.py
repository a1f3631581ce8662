"""`python -m bench.simulator`: the same as `rantang simulate`."""

from bench.simulator.command import app

app()
