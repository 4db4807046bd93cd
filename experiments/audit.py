"""Replays a run's recorded rollout through the trainer and names where codes part.

python -m experiments.audit --run=DIR
"""

import json
from pathlib import Path

import jax
import numpy as np
from absl import flags

from experiments import cli
from trace_jax.audit import first_parting
from trace_jax.config import freeze
from trace_jax.trainer import Trainer

RUN = flags.DEFINE_string("run", None, "Run folder made by experiments.train or quickstart.")


def main():
    folder = Path(RUN.value)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run; write --run=DIR with the folder of a run")
    config = freeze(json.loads((folder / "config.json").read_text()))
    trainer = Trainer(config, folder)
    step, state, _ = trainer.restore(trainer.start(trainer.fresh_params()))
    recorded = trainer.audits.read_metadata().get("step", step)
    if recorded != step:
        raise ValueError(
            f"{folder}: its rollout was recorded at step {recorded} and the newest checkpoint is "
            f"of step {step}; finish the run with --resume"
        )
    rollout = trainer.load_audit()
    params, version = state["train"].params, state["train"].version
    codes, live = trainer.learner.audit(params, rollout, version)
    ledger = jax.device_get(trainer.code_ledger(rollout, codes, live))
    print(f"{folder}: step {step}, mode {config.mode}, {live.shape[1]} sequences")
    if not codes:
        print(f"mode {config.mode}: the trainer quantizes nothing, there are no codes to compare")
        return
    sites = sorted({k.split("/")[1] for k in ledger if k.startswith("agreement/") and "layer" in k})
    print("share of equal codes\nlayer  " + "  ".join(f"{s:>10}" for s in sites) + "      routes")
    for i in range(config.model.num_layers):
        shares = [f"{float(ledger[f'agreement/{s}/layer{i}']):10.5f}" for s in sites]
        print(f"{i:5d}  {'  '.join(shares)}  {float(ledger[f'routes/agreement/layer{i}']):10.5f}")
    found = first_parting(rollout, codes, trainer.mode.rollout)
    if found is None:
        print("no code differs")
        cli.print_json({"parting": None})
        return
    token = int(np.asarray(rollout.tokens)[found.row, found.position])
    text = trainer.actor.tokenizer.decode([token])
    print(
        f"first parting: layer {found.layer}, site {found.site}, sequence {found.row}, "
        f"token {found.position} (id {token}, {text!r}), element {found.index}\n"
        f"  rollout: code {found.rollout_code:2d} = {found.rollout_value:+.6g} "
        f"at scale {found.rollout_scale:.6g}\n"
        f"  trainer: code {found.trainer_code:2d} = {found.trainer_value:+.6g} "
        f"at scale {found.trainer_scale:.6g}"
    )
    cli.print_json({"parting": found._asdict()})


if __name__ == "__main__":
    flags.mark_flag_as_required("run")
    cli.run(main)
