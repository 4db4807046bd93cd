"""Methods by name: what each sets, and that a setting given by hand stays."""

import pytest
from helpers import SHAPE

from trace_jax import methods
from trace_jax.config import Config, ConfigError, default, freeze, to_dict
from trace_jax.rl.losses import ALGORITHMS

# method: mode, correction, cap, routes replayed
TABLE = {
    "bf16": ("bf16", "none", 5, True),
    "post_hoc": ("post_hoc", "none", 5, True),
    "post_hoc_4over6": ("post_hoc", "none", 5, True),
    "naive": ("naive", "none", 5, False),
    "routing_replay": ("naive", "none", 5, True),
    "tis": ("naive", "tis", 2, True),
    "icepop": ("naive", "icepop", 5, True),
    "score_centering": ("naive", "none", 5, True),
    "qat": ("qat", "tis", 5, True),
    "w4a16": ("w4a16", "tis", 5, True),
    "quads": ("quads", "tis", 5, True),
    "qarl": ("qat", "none", 5, True),
    "trace_codes": ("trace", "tis", 5, True),
    "trace": ("trace", "tis", 5, True),
    "trace_all": ("trace", "tis", 5, True),
}


def config_of(method: str, **groups) -> Config:
    config = default(**SHAPE)
    config.method = method
    for name, values in groups.items():
        config[name].update(values)
    return freeze(config)


def test_the_table_has_every_method():
    assert set(TABLE) == set(methods.METHODS)


@pytest.mark.parametrize("name", TABLE)
def test_a_method_is_the_settings_of_the_table(name):
    c = config_of(name)
    rl = c.rl
    assert (c.mode, rl.correction, rl.correction_cap, rl.routing_replay) == TABLE[name]
    assert c.method == name
    assert (rl.score_centering > 0) == (name == "score_centering")
    assert (rl.algorithm, rl.old_logprobs) == (
        ("tbpo", "rollout") if name == "qarl" else ("grpo", "learner")
    )
    assert c.precision.weights == ("nvfp4_4over6" if name == "post_hoc_4over6" else "nvfp4")


def test_guided_methods_differ_in_their_plans_alone():
    plan = lambda name: config_of(name).guidance
    paper = ("expert_in", "k", "v")
    got = {n: (plan(n).layers, plan(n).sites, plan(n).bits) for n in TABLE if n[:5] == "trace"}
    assert got == {
        "trace": ("last:0.5", paper, 1),
        "trace_codes": ("all", paper, 4),
        "trace_all": ("all", ("expert_in", "expert_mid", "k", "v"), 1),
    }


def test_a_default_given_by_hand_stays_too():
    config = default(**SHAPE)
    config.method = "trace_all"
    assert freeze(config).guidance.layers == "all"
    assert freeze(config, {"guidance.layers"}).guidance.layers == "last:0.5"
    back = freeze(to_dict(freeze(config, {"guidance.layers"})))
    assert back.guidance.layers == "last:0.5", "a configuration read back is as it was"


def test_a_setting_given_by_hand_stays():
    c = config_of("trace_codes", guidance={"layers": "last:0.25"}, rl={"correction": "icepop"})
    assert (c.guidance.layers, c.guidance.bits, c.rl.correction) == ("last:0.25", 4, "icepop")


@pytest.mark.parametrize("name", TABLE)
def test_freezing_again_changes_nothing(name):
    c = config_of(name, guidance={"guard": 0.4})
    assert freeze(to_dict(c)) == c


def test_an_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match=r"^method is 'icepopp'; did you mean 'icepop'\?"):
        config_of("icepopp")


def test_without_a_method_nothing_is_set():
    assert freeze(default(**SHAPE)).mode == "trace" and freeze(default(**SHAPE)).method == ""


def test_the_header_shows_what_the_method_came_to():
    c = config_of("trace_codes", guidance={"layers": "0,1"})
    assert methods.settings(to_dict(c), "trace_codes") == {
        "mode": "trace",
        "guidance.bits": 4,
        "guidance.layers": "0,1",
        "rl.correction": "tis",
        "rl.correction_cap": 5.0,
    }


def test_the_band_of_qarl_is_its_papers():
    """arXiv 2604.07853: 4e-4 above; 3e-4 and 7e-4 around negative advantages."""
    tbpo = ALGORITHMS["tbpo"]
    band = tbpo["level"], tbpo["clip_high"], tbpo["clip_low"], tbpo["dual_clip"] - 1
    assert band == ("sequence", 4e-4, 3e-4, pytest.approx(7e-4))


def test_score_centring_with_importance_weights_is_refused():
    with pytest.raises(ConfigError, match=r"^rl\.score_centering is 128 with rl\.correction 'tis'"):
        config_of("score_centering", rl={"correction": "tis"})
