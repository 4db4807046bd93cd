"""A small MoE writes one-line programs from examples, judged in the sandbox, with NVFP4 and TRACE.

    python -m experiments.train --config=configs/quickstart_coding.py --workdir=runs/coding

Not run in full yet; estimated at 15 minutes on two free cores. 8 RL steps went through from 200
steps of the warm start (experiments/tasks): from 6 of 31 held-out problems to 7. Needs Linux with
user namespaces: programs are isolated, or nothing runs. The warm start learns to write Python and
to guess; what the examples mean is beyond so small a model, so RL picks the guesses that pay. It
shows the whole path, not a model that can program.
"""

from configs.quickstart import small


def get_config():
    config = small(layers=3, hidden=96)
    config.method = "trace"
    config.task.kind = "examples"
    config.task.params = (("difficulty", 1), ("shown", 2), ("hidden", 6))
    config.task.max_prompt = 110
    config.task.max_response = 60
    config.warmup.steps = 400
    config.warmup.batch_size = 64
    config.rl.steps = 30
    config.rl.prompts_per_step = 8
    config.rl.samples = 8
    config.eval.problems = 64
    config.eval.samples = 1
    config.ledger.audit_rows = 4
    return config
