"""A small MoE finds its way out of mazes of four rooms, turn by turn, with FP4 rollouts and TRACE.

    python -m experiments.train --config=configs/quickstart_multiturn.py --workdir=runs/maze

About 12 minutes of one CPU core, 2 GB. A quarter of the teacher's walks are reversed, so it often
runs into walls; RL unlearns that. What this shows is that episodes train end to end under FP4; it
says nothing about long horizons, and one seed is no finding.
"""

from configs.quickstart import small


def get_config():
    config = small(layers=3, hidden=96)
    config.method = "trace"
    config.task.kind = "key_maze"
    config.task.params = (("width", 2), ("height", 2), ("keys", 0))
    config.task.max_prompt = 80
    config.task.turns = 4
    config.task.turn_tokens = 7
    config.task.observation_tokens = 48
    config.task.max_response = 4 * 7 + 3 * 48
    config.warmup.steps = 150
    config.warmup.batch_size = 64
    config.warmup.wrong_answers = 0.25
    config.rl.steps = 30
    config.rl.prompts_per_step = 16
    config.rl.samples = 4
    config.eval.problems = 64
    config.eval.samples = 2
    config.ledger.audit_rows = 4
    return config
