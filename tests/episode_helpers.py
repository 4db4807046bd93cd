"""A policy that follows a script, and an episode played by it."""

from trace_jax.tasks import ByteTokenizer
from trace_jax.tasks.multiturn import Budget, Episode, play

TOK = ByteTokenizer()


class Script:
    """A policy that says given texts in turn and keeps the prompts it saw."""

    def __init__(self, *texts, end=True):
        self.texts, self.seen, self.end = list(texts), [], end

    def __call__(self, ids):
        self.seen.append(list(ids))
        text = self.texts[min(len(self.seen), len(self.texts)) - 1]
        ids = list(text) if isinstance(text, (list, tuple)) else TOK.encode(text)
        return [*ids, TOK.eos_id] if self.end else ids


def run(env, *texts, seed=0, **budget):
    budget = {"turn_tokens": 32, "observation_tokens": 400, "episode_tokens": 4000, **budget}
    policy = Script(*texts)
    return play(Episode(env, seed, TOK, Budget(**budget)), policy), policy
