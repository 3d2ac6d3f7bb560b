"""Every recipe's configuration composes for FSDP and Megatron, becomes verl's dataclasses, and refuses bad values."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from pathlib import Path

import pytest
import verl  # noqa: F401  loads the plug-in
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf, open_dict
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import (
    CriticConfig,
    FSDPActorConfig,
    HFModelConfig,
    McoreActorConfig,
    PolicyLossConfig,
    RolloutConfig,
)

import recipes
from verl_ext.preflight import check_methods
from verl_ext.registry import METHODS, ConfigError

ENGINES = {"fsdp": FSDPActorConfig, "megatron": McoreActorConfig}
# What verl asks of every run.
RUN = (
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
)
each_recipe = pytest.mark.parametrize("recipe", recipes.names())


@functools.cache
def _composed(recipe: str, engine: str) -> DictConfig:
    engine_override = ["model_engine=megatron"] if engine == "megatron" else []
    with initialize_config_dir(str(recipes.ROOT / recipe / "config"), version_base=None):
        return compose(recipe, overrides=[*engine_override, *RUN])


def composed(recipe: str, changes: dict | None = None, engine: str = "fsdp") -> DictConfig:
    """The recipe's configuration with some values changed (composing takes most of a second, so it is done once)."""
    config = copy.deepcopy(_composed(recipe, engine))
    with open_dict(config):
        for key, value in (changes or {}).items():
            OmegaConf.update(config, key, value, force_add=True)
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A model folder without weights: what verl's model configuration reads."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    ).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return folder


@each_recipe
@pytest.mark.parametrize("engine", ENGINES)
def test_composes_and_becomes_verls_dataclasses(recipe, engine, model):
    config = composed(recipe, {"actor_rollout_ref.model.path": str(model), "critic.model.path": str(model)}, engine)
    validate_config(config, use_reference_policy=True, use_critic=False)
    check_methods(config)
    part = config.actor_rollout_ref
    assert isinstance(omega_conf_to_dataclass(part.actor), ENGINES[engine])
    assert isinstance(omega_conf_to_dataclass(part.rollout), RolloutConfig)
    assert isinstance(omega_conf_to_dataclass(part.model), HFModelConfig)
    assert isinstance(omega_conf_to_dataclass(config.critic), CriticConfig)
    omega_conf_to_dataclass(part.rollout.checkpoint_engine)
    # As verl's worker renames the keys of `ref` before it reads them (workers/engine_workers.py, init_model).
    with open_dict(part.ref):
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
            part.ref[f"ppo_{key}"] = part.ref.pop(f"log_prob_{key}")
        part.ref.use_dynamic_bsz = part.ref.pop("log_prob_use_dynamic_bsz")
    assert isinstance(omega_conf_to_dataclass(part.ref), ENGINES[engine])


@each_recipe
def test_the_names_it_selects_are_registered(recipe):
    config = composed(recipe)
    assert config.algorithm.adv_estimator in ADV_ESTIMATOR_REGISTRY
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode in POLICY_LOSS_REGISTRY
    assert config.trainer.v1.trainer_mode == "recipe_sync"
    assert config.trainer.use_v1


@pytest.mark.parametrize("name", [n for n in METHODS if n in recipes.names()])
def test_the_file_lists_every_switch_with_its_default(name):
    method, algorithm = METHODS[name], composed(name).algorithm
    listed = OmegaConf.to_container(algorithm[name]) if name in algorithm else {}
    assert listed == dataclasses.asdict(method.config_class())


@pytest.mark.parametrize("name", [n for n in METHODS if n in recipes.names()])
def test_an_unknown_key_is_refused_by_its_full_name(name):
    with pytest.raises(ConfigError, match=rf"algorithm\.{name}\.no_such_key is unknown; the keys are"):
        check_methods(composed(name, {f"algorithm.{name}.no_such_key": 1}))


@pytest.mark.parametrize(
    ("name", "key", "kind"),
    [
        (n, f.name, str(f.type))
        for n, m in METHODS.items()
        if n in recipes.names()
        for f in dataclasses.fields(m.config_class)
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_keys_full_name(name, key, kind):
    """A word for a number, a number for a word, not a number."""
    senseless = {"str": (1, "no_such_word"), "Text": (1,), "float": ("word", math.nan, True), "int": ("word", 1.5)}
    for value in senseless.get(kind, (math.nan,)):
        with pytest.raises(ConfigError, match=rf"algorithm\.{name}\.{key}={value!r}"):
            check_methods(composed(name, {f"algorithm.{name}.{key}": value}))


# -- settings that a loss reads from the workers own configuration ----------------------------------------------------

LOSS = "actor_rollout_ref.actor.policy_loss"
with_loss_config = pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.loss_config])


def own_fields(name: str) -> dict[str, dataclasses.Field]:
    theirs = {f.name for f in dataclasses.fields(PolicyLossConfig)}
    return {f.name: f for f in dataclasses.fields(get_class(METHODS[name].loss_config)) if f.name not in theirs}


@with_loss_config
def test_the_file_lists_every_setting_of_the_loss_with_its_default(name):
    given = composed(name).actor_rollout_ref.actor.policy_loss
    assert given._target_ == METHODS[name].loss_config and given.loss_mode == name
    theirs = {f.name for f in dataclasses.fields(PolicyLossConfig)}
    listed = {key: value for key, value in OmegaConf.to_container(given).items() if key not in theirs}
    assert listed == {key: f.default for key, f in own_fields(name).items()}


@with_loss_config
def test_a_wrong_setting_of_the_loss_is_refused(name):
    """A word for a number, a number for a word, not a number, and a key that does not exist."""
    for key, field in own_fields(name).items():
        values = (1, "no_such_word") if field.type == "str" else ("word", math.nan, True)
        for value in values:
            with pytest.raises(ConfigError, match=re.escape(f"{LOSS}.{key}={value!r}")):
                check_methods(composed(name, {f"{LOSS}.{key}": value}))
    with pytest.raises(ConfigError, match="no_such_key"):
        check_methods(composed(name, {f"{LOSS}.no_such_key": 1}))


@with_loss_config
def test_without_its_class_the_message_says_which_it_is(name):
    with pytest.raises(ConfigError, match=rf"{LOSS}\._target_={METHODS[name].loss_config}"):
        check_methods(composed(name, {f"{LOSS}._target_": "verl.workers.config.PolicyLossConfig"}))


@each_recipe
def test_group_size_one_is_refused(recipe):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.n=1.*Set actor_rollout_ref\.rollout\.n=8"):
        check_methods(composed(recipe, {"actor_rollout_ref.rollout.n": 1}))


@each_recipe
def test_unknown_names_are_refused(recipe):
    with pytest.raises(ConfigError) as error:
        check_methods(
            composed(
                recipe,
                {"algorithm.adv_estimator": "no_such", "actor_rollout_ref.actor.policy_loss.loss_mode": "no_such"},
            )
        )
    assert "algorithm.adv_estimator='no_such' is not registered" in str(error.value)
    assert "actor_rollout_ref.actor.policy_loss.loss_mode='no_such' is not registered" in str(error.value)


@each_recipe
@pytest.mark.parametrize(("key", "value"), [("warn_above", 1.5), ("warn_steps", 0), ("window", 1)])
def test_the_watchs_settings_are_checked(recipe, key, value):
    with pytest.raises(ConfigError, match=rf"algorithm\.acr\.{key}={value}"):
        check_methods(composed(recipe, {f"algorithm.acr.{key}": value}))
