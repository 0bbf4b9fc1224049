"""The demo: a small language model trained by the stock verl pipeline on a plain CPU.

- `settings`: the two models, their tasks and how the recipe is changed for them
- `model`: makes (and warm-starts) the model; measures its accuracy outside verl
- `launch`: runs the stock `verl.trainer.main_ppo`, follows it, and cleans up after it
- `report`: the table and the plot
"""
