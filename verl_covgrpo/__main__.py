"""python -m verl_covgrpo: the verl-covgrpo command."""

from verl_covgrpo.cli import app

app()
