"""Checks before anything expensive starts. Each failure names the key, the value and the fix, and all are told at once.

`check_methods` looks at the configuration alone (our trainer modes call it as well); `check_run` also looks at the
machine and the files: model, data, reward function, memory, disk. `python -m verl_ext.main` runs it before Ray starts.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import DictConfig, ListConfig, OmegaConf
from packaging.specifiers import SpecifierSet

from verl_ext import SUPPORTED_VERL
from verl_ext.acr import watch
from verl_ext.probe import ulysses
from verl_ext.registry import METHODS, ConfigError, Method
from verl_ext.rewards import canonical_answer

TRAINER_MODES = ("recipe_sync", "recipe_colocate_async", "recipe_separate_async")
# A rollout that has fewer than two samples per prompt has nothing to compare; these estimators do not compare.
NOT_GROUP_RELATIVE = {"gae", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline"}


def check_methods(config: DictConfig) -> None:
    """Refuse a method configuration that cannot work. Raises ConfigError with every problem found."""
    _raise_all(_method_problems(config))


def check_run(config: DictConfig) -> None:
    """Everything that can be known before Ray starts. Raises ConfigError with every problem found."""
    _raise_all(_run_problems(config))
    checks = [  # these read the numbers that were just checked
        _method_problems,
        _batch_problems,
        _version_problems,
        _model_problems,
        _data_problems,
        _reward_problems,
        _machine_problems,
    ]
    _raise_all(problem for check in checks for problem in check(config))


def _raise_all(problems: Iterator[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("the run was not started:\n" + "\n".join(f"  - {problem}" for problem in found))


def _caught(check: Callable, *args) -> Iterator[str]:
    try:
        check(*args)
    except (ConfigError, ValueError, TypeError) as error:
        yield str(error)


def _run_problems(config: DictConfig) -> Iterator[str]:
    trainer = config.trainer
    for key, low in (
        ("data.train_batch_size", 1),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", 1),
        ("trainer.n_gpus_per_node", 1),
        ("trainer.nnodes", 1),
        ("trainer.total_training_steps", 1),
        ("trainer.total_epochs", 1),
        ("trainer.save_freq", -1),
    ):
        value = OmegaConf.select(config, key)
        if value is None and key == "trainer.total_training_steps":
            continue  # verl counts epochs then
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            yield f"{key}={value!r} must be a whole number of at least {low}."
            return
    mode = trainer.v1.trainer_mode
    modes = (*TRAINER_MODES, *(name.removeprefix("recipe_") for name in TRAINER_MODES))
    if mode not in modes:
        yield f"trainer.v1.trainer_mode={mode!r} is not one of {', '.join(modes)}."
    if trainer.resume_mode not in ("auto", "disable", "resume_path"):
        yield f"trainer.resume_mode={trainer.resume_mode!r} is not one of auto, disable, resume_path."
    if trainer.resume_mode == "resume_path" and not Path(str(trainer.resume_from_path)).is_dir():
        yield f"trainer.resume_from_path={trainer.resume_from_path}: there is no such folder (global_step_<n>)."
    actor, ranks = config.actor_rollout_ref.actor, trainer.n_gpus_per_node * trainer.nnodes
    if actor.strategy == "megatron":
        split = actor.megatron.tensor_model_parallel_size * actor.megatron.pipeline_model_parallel_size
        split *= actor.megatron.context_parallel_size
    else:
        split = ulysses(actor)
    n, parallel = config.actor_rollout_ref.rollout.n, max(1, ranks // split)
    if isinstance(n, int) and actor.ppo_mini_batch_size * n % parallel:
        yield (
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} x rollout.n={n} ="
            f" {actor.ppo_mini_batch_size * n} rows do not divide over {parallel} data-parallel ranks. Make it a"
            " multiple (and data.train_batch_size with it)."
        )


def _method_problems(config: DictConfig) -> Iterator[str]:
    algorithm = config.algorithm
    name, n = algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    loss = config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    for key, value, registry in (
        ("algorithm.adv_estimator", name, ADV_ESTIMATOR_REGISTRY),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", loss, POLICY_LOSS_REGISTRY),
    ):
        if value not in registry:
            yield (
                f"{key}={value!r} is not registered; known: {', '.join(sorted(registry))}. `python -m verl_ext doctor`"
                " says why."
            )
    yield from _caught(watch, algorithm)
    temperature = config.actor_rollout_ref.rollout.temperature
    if not isinstance(temperature, int | float) or temperature <= 0:
        yield f"actor_rollout_ref.rollout.temperature={temperature!r} must be a number above 0. Set it to 1.0."
    if not isinstance(n, int):
        yield f"actor_rollout_ref.rollout.n={n!r} must be a whole number. Set actor_rollout_ref.rollout.n=8."
    elif n < 2 and name not in NOT_GROUP_RELATIVE:
        yield (
            f"actor_rollout_ref.rollout.n={n}: {name} compares the responses of one prompt with each other, so it"
            " needs at least two. Set actor_rollout_ref.rollout.n=8."
        )
    for used in {name, loss} & set(METHODS):
        method = METHODS[used]
        wrong = list(_caught(method.config, algorithm))
        yield from wrong
        if method.check and not wrong:  # it reads the settings
            yield from _caught(method.check, config)
        needs_us = [need for need in method.needs if need != "acc"] if used == name and method.estimator else []
        needs_us += list(method.loss_needs) if used == loss else []
        mode = config.trainer.v1.trainer_mode
        if needs_us and mode not in TRAINER_MODES:
            yield (
                f"trainer.v1.trainer_mode={mode!r} does not hand {', '.join(needs_us)} to {used}. "
                f"Set trainer.v1.trainer_mode=recipe_{mode}."
            )
    if loss in METHODS:
        yield from _loss_problems(config, METHODS[loss])


def _loss_problems(config: DictConfig, method: Method) -> Iterator[str]:
    """What a policy loss of ours reads: fields that somebody must provide, and settings of its own."""
    from verl.utils.config import omega_conf_to_dataclass

    estimator = METHODS.get(config.algorithm.adv_estimator)
    provided = estimator.provides if estimator else ()
    missing = [] if method.row_fields else [name for name in method.loss_needs if name not in provided]
    if missing:
        givers = [m.name for m in METHODS.values() if m.estimator and set(missing) <= set(m.provides)]
        yield (
            f"actor_rollout_ref.actor.policy_loss.loss_mode={method.name} reads {', '.join(missing)}, which"
            f" algorithm.adv_estimator={config.algorithm.adv_estimator} does not provide. Set algorithm.adv_estimator"
            f" to {' or '.join(givers) or 'an estimator that does'}."
        )
    given = config.actor_rollout_ref.actor.policy_loss
    if not method.loss_config:
        return
    key = "actor_rollout_ref.actor.policy_loss"
    try:
        omega_conf_to_dataclass(given)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, ConfigError):
            yield str(cause)
        else:
            yield (
                f"{key} cannot be read ({cause}). Its class is {given.get('_target_')}; the settings of {method.name}"
                f" are those of {key}._target_={method.loss_config}."
            )


def _batch_problems(config: DictConfig) -> Iterator[str]:
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        yield (
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini},"
            " the prompts of one update: verl would fill the last one with empty rows. Change one of the two."
        )


def _version_problems(config: DictConfig) -> Iterator[str]:
    version = importlib.metadata.version("verl")
    if not SpecifierSet(SUPPORTED_VERL).contains(version, prereleases=True):
        yield (
            f"verl {version} is installed, but the extension points used here were checked with verl{SUPPORTED_VERL}."
        )


def _model_problems(config: DictConfig) -> Iterator[str]:
    path = str(config.actor_rollout_ref.model.path)
    local = Path(os.path.expanduser(path))
    # `org/name` is a hub name; everything else is a folder.
    looks_local = path.startswith((".", "/", "~")) or path.count("/") != 1
    if local.is_dir():
        if not (local / "config.json").exists():
            yield (
                f"actor_rollout_ref.model.path={path}: the folder has no config.json, so it is not a Hugging Face"
                " model."
            )
        elif not any(local.glob("*.safetensors")) and not any(local.glob("*.bin")):
            yield f"actor_rollout_ref.model.path={path}: the folder holds no weights (*.safetensors)."
        limit, asked = _positions(local), config.actor_rollout_ref.rollout.get("max_model_len", None)
        if limit and asked and asked > limit:
            yield (
                f"actor_rollout_ref.rollout.max_model_len={asked}, but the model at {path} has {limit} positions."
                f" Set it to {limit} or less."
            )
    elif path.startswith("hdfs://"):
        return
    elif looks_local:
        yield (
            f"actor_rollout_ref.model.path={path}: there is no such folder. Give a model folder, or a hub name such as"
            " Qwen/Qwen3-0.6B."
        )
    elif os.environ.get("HF_HUB_OFFLINE", "0") == "1" and not _in_hub_cache(path):
        yield (
            f"actor_rollout_ref.model.path={path} is not in the local hub cache and HF_HUB_OFFLINE=1. Unset it, or"
            " give a folder."
        )


def _positions(folder: Path) -> int | None:
    try:
        return json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
    except (OSError, ValueError):
        return None


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _data_problems(config: DictConfig) -> Iterator[str]:
    import pyarrow.parquet as pq

    prompt_key = config.data.get("prompt_key", "prompt")
    for key in ("train_files", "val_files"):
        files = config.data[key]
        for file in files if isinstance(files, list | ListConfig) else [files]:
            path = Path(os.path.expanduser(str(file)))
            if str(file).startswith("hdfs://"):
                continue
            if not path.exists():
                yield f"data.{key}={file}: there is no such file. scripts/data/ makes the usual sets in verl's schema."
                continue
            if path.suffix != ".parquet":
                continue
            try:
                schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
            except Exception as error:
                yield f"data.{key}={file} is not a readable parquet file ({error}). Make it again."
                continue
            missing = [c for c in (prompt_key, "data_source", "reward_model") if c not in schema.names]
            if missing:
                yield (
                    f"data.{key}={file} lacks the column(s) {', '.join(missing)}; it has {', '.join(schema.names)}."
                    " verl needs prompt (a list of chat messages), data_source and reward_model.ground_truth; see"
                    " scripts/data/."
                )
            elif rows:
                yield from _row_problems(path, key, prompt_key)
            estimator = METHODS.get(config.algorithm.adv_estimator)
            if key == "train_files" and estimator and estimator.probe and not missing:
                yield from _answer_problems(path, estimator.name)
            batch = config.data.train_batch_size
            if key == "train_files" and rows < batch and not isinstance(files, list | ListConfig):
                yield (
                    f"data.train_files={file} has {rows} rows, fewer than data.train_batch_size={batch}. Lower the"
                    " batch size."
                )


def _answer_problems(path: Path, name: str) -> Iterator[str]:
    """A method that asks for the answer needs one in every row."""
    import pyarrow.parquet as pq

    without = []
    for row, entry in enumerate(pq.read_table(path, columns=["reward_model"])["reward_model"].to_pylist()):
        try:
            canonical_answer((entry or {}).get("ground_truth"))
        except (TypeError, ValueError) as error:
            without.append(f"row {row}: {error}")
    if without:
        yield (
            f"data.train_files={path}: {len(without)} rows have no reward_model.ground_truth that {name} could ask for"
            f" ({without[0]}). Take them out, or give them a short answer."
        )


def _row_problems(path: Path, key: str, prompt_key: str) -> Iterator[str]:
    """What the first row shows: prompts are chat messages, and there is an answer to check against."""
    import pyarrow.parquet as pq

    batch = next(pq.ParquetFile(path).iter_batches(batch_size=1, columns=[prompt_key, "reward_model"]))
    row = batch.to_pylist()[0]
    prompt, answer = row[prompt_key], row["reward_model"]
    if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], dict) or "content" not in prompt[0]:
        yield (
            f"data.{key}={path}: {prompt_key} of the first row is not a list of chat messages such as"
            f' [{{"role": "user", "content": ...}}]; see scripts/data/.'
        )
    if not isinstance(answer, dict) or "ground_truth" not in answer:
        yield (
            f'data.{key}={path}: reward_model of the first row is not {{"style": "rule", "ground_truth": ...}}; see'
            " scripts/data/."
        )


def _reward_problems(config: DictConfig) -> Iterator[str]:
    function = config.reward.custom_reward_function
    if not function.get("path"):
        return
    from verl.utils.import_utils import load_extern_object

    try:
        load_extern_object(function.path, function.name)
    except Exception as error:
        yield (
            f"reward.custom_reward_function.path={function.path}, name={function.name}: cannot be loaded "
            f"({type(error).__name__}: {error})."
        )


def _machine_problems(config: DictConfig) -> Iterator[str]:
    checkpoints = Path(os.path.expanduser(str(config.trainer.default_local_dir))).absolute()
    place = next(parent for parent in [checkpoints, *checkpoints.parents] if parent.exists())
    if not os.access(place, os.W_OK):
        yield f"trainer.default_local_dir={checkpoints}: {place} cannot be written to."
    shapes = _weight_shapes(config)
    weights = 4 * sum(math.prod(shape) for shape in shapes.values())  # bytes in float32
    if config.trainer.save_freq > 0 and weights:
        # Model and two Adam moments in float32, per checkpoint kept.
        need, free = 3 * weights, shutil.disk_usage(place).free
        if free < need:
            yield (
                f"trainer.default_local_dir={checkpoints}: {free / 1e9:.1f} GB free, but one checkpoint takes about"
                f" {need / 1e9:.1f} GB. Free some space, choose another folder, or set trainer.save_freq=-1."
            )
    bucket = config.actor_rollout_ref.rollout.checkpoint_engine.get("update_weights_bucket_megabytes", None)
    width = 4 if config.actor_rollout_ref.rollout.dtype == "float32" else 2
    for name, shape in shapes.items():
        size = width * math.prod(shape) / 2**20
        if bucket and size > bucket:
            yield (
                f"actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes={bucket} is smaller than"
                f" the weight {name} ({size:.0f} MB), so the weights cannot be sent to the rollout. Set it to"
                f" {math.ceil(size / 64) * 64}."
            )
            break
    if config.trainer.device == "cpu":
        import psutil

        # Measured: Ray, one FSDP rank, vLLM, reward and agent workers take about 7 GB, a further rank 2.5 GB.
        # Six copies of the weights: actor, gradient, two moments, rollout, one in transit.
        # 25 bytes per token of a micro-batch and vocabulary entry.
        actor, ranks = config.actor_rollout_ref.actor, config.trainer.n_gpus_per_node * config.trainer.nnodes
        tokens = actor.ppo_max_token_len_per_gpu
        if not actor.use_dynamic_bsz:
            length = config.data.max_prompt_length + config.data.max_response_length
            tokens = (actor.get("ppo_micro_batch_size_per_gpu", None) or 1) * length
        vocabulary = max((shape[0] for name, shape in shapes.items() if "embed" in name), default=0)
        need = 4.5e9 + ranks * (2.5e9 + 6 * weights + 25 * tokens * vocabulary)
        free = psutil.virtual_memory().available
        if free < need:
            yield (
                f"{free / 1e9:.1f} GB of memory are available, but {ranks} rank(s) on the CPU take up to"
                f" {need / 1e9:.1f} GB: {6 * weights / 1e9:.1f} each for the weights,"
                f" {25 * tokens * vocabulary / 1e9:.1f} for a micro-batch of {tokens} tokens. Lower"
                " actor_rollout_ref.actor.ppo_max_token_len_per_gpu, use a smaller model, or close other programs."
            )


def _weight_shapes(config: DictConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights by name, read from the file headers; {} when the model is not a local folder."""
    from safetensors import safe_open

    shapes = {}
    for file in Path(os.path.expanduser(str(config.actor_rollout_ref.model.path))).glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
    return shapes


def describe(config: DictConfig) -> str:
    """One line on what is about to run."""
    select = lambda key: OmegaConf.select(config, key)  # noqa: E731
    return (
        f"verl_ext: {select('algorithm.adv_estimator')} with loss"
        f" {select('actor_rollout_ref.actor.policy_loss.loss_mode')}, {select('data.train_batch_size')} prompts x"
        f" {select('actor_rollout_ref.rollout.n')} responses, mode {select('trainer.v1.trainer_mode')}, verl"
        f" {importlib.metadata.version('verl')}"
    )
