"""Read a question set and write verl's parquet files; shared by the scripts beside it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

SPLITS = ("train", "test")
TEMPLATES = {
    "boxed": "{question} Let's think step by step and output the final answer within \\boxed{{}}.",
    "hashes": '{question} Let\'s think step by step and output the final answer after "####".',
}


class DataError(RuntimeError):
    """The data set cannot be made; the message says why and what to do."""


def say(text: str) -> None:
    print(f"[data] {text}", flush=True)


def arguments(description: str, hub: str, template: str) -> argparse.ArgumentParser:
    """Options that all data scripts share; ``hub`` and ``template`` are the defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--local_save_dir", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument("--local_dataset_path", type=Path, help="folder with train.* and test.* (jsonl, json, parquet)")
    parser.add_argument("--hub_name", default=hub, help=f"data set on the Hugging Face hub (default: {hub})")
    parser.add_argument(
        "--template",
        default=template,
        help=f"boxed, hashes, or a text of your own with {{question}} in it (default: {template}). verl_ext.rewards "
        "reads both forms; with strict_box, and for most other MATH verifiers, it must be boxed; verl's own GSM8K "
        "reward wants hashes",
    )
    parser.add_argument("--max_rows", type=int, help="keep the first N usable rows of each split")
    return parser


def load(options: argparse.Namespace, columns: tuple[str, ...], config: str | None = None) -> dict[str, list[dict]]:
    """Rows of both splits, from the folder if one is given, else from the hub.

    Args:
        options: parsed options of :func:`arguments`.
        columns: columns that must be there.
        config: name of the hub configuration.

    Raises:
        DataError: ``--max_rows`` below 1, no such folder or file, an unreadable file, no network, a missing column, or
            a split without rows.
    """
    import datasets

    if options.max_rows is not None and options.max_rows < 1:
        raise DataError(f"--max_rows {options.max_rows}: must be at least 1")
    datasets.disable_progress_bars()
    found = {}
    for split in SPLITS:
        if options.local_dataset_path:
            source = _local_file(options.local_dataset_path.expanduser(), split, config)
            kind = "parquet" if source.suffix == ".parquet" else "json"
            where, call = str(source), {"path": kind, "data_files": str(source), "split": "train"}
            fix = "the file is damaged or of another format"
        else:
            where, call = options.hub_name, {"path": options.hub_name, "name": config, "split": split}
            fix = "check the network, or give a folder with the files: --local_dataset_path DIR"
        say(f"reading {split} from {where}")
        try:
            table = datasets.load_dataset(**call)
        except Exception as error:  # the hub client and the readers raise many kinds
            raise DataError(f"cannot load {split} from {where}: {type(error).__name__}: {error}\nfix: {fix}") from error
        missing = [column for column in columns if column not in table.column_names]
        if missing:
            raise DataError(
                f"{where}: columns {missing} are missing; found {table.column_names}, wanted {list(columns)}"
            )
        if not len(table):
            raise DataError(f"{where}: the {split} split has no rows")
        found[split] = table.to_list()
    return found


def _local_file(folder: Path, split: str, config: str | None) -> Path:
    if not folder.is_dir():
        raise DataError(f"--local_dataset_path {folder}: no such folder")
    for place in filter(None, (folder, folder / config if config else None, folder / "data")):
        for pattern in ("parquet", "jsonl", "json"):
            # The second form is a copy of a hub repository.
            files = [*place.glob(f"{split}.{pattern}"), *place.glob(f"{split}-00000-of-00001.{pattern}")]
            if files:
                return files[0]
    names = sorted(path.name for path in folder.iterdir())
    raise DataError(
        f"--local_dataset_path {folder}: holds no {split}.parquet, {split}.jsonl or {split}.json; it holds {names[:10]}"
    )


def instruction(template: str) -> Callable[[str], str]:
    """The function that puts a question into ``template`` (a name in TEMPLATES or a text with ``{question}``)."""
    if template in TEMPLATES:
        return lambda question: TEMPLATES[template].format(question=question)
    if "{question}" not in template:
        raise DataError(
            f"--template {template!r}: neither one of {sorted(TEMPLATES)} nor a text with {{question}} in it"
        )
    return lambda question: template.replace("{question}", question)  # not format(): the text may hold \boxed{}


def row(source: str, split: str, index: int, prompt: str, truth: str, question: str, answer: str, **extra) -> dict:
    """One row in verl's schema.

    Args:
        source: ``data_source``, by which verl chooses its own reward and groups validation metrics.
        split: "train" or "test".
        index: row number in the source, before any row is dropped.
        prompt: the user message.
        truth: reference answer for the reward.
        question: the question as in the source.
        answer: the worked solution as in the source.
        extra: further entries of ``extra_info``.
    """
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer, **extra},
    }


def save(splits: dict[str, list[dict]], options: argparse.Namespace) -> None:
    """Write the splits into ``--local_save_dir``, both or none, and show what was written.

    Raises:
        DataError: a split is empty.
    """
    import datasets

    folder = options.local_save_dir.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    parts = {split: folder / f".{split}.parquet.{os.getpid()}" for split in splits}
    try:
        for split, rows in splits.items():
            if not rows:
                raise DataError(f"{split}: no row is left; nothing was written to {folder}")
            splits[split] = rows[: options.max_rows]
            datasets.Dataset.from_list(splits[split]).to_parquet(parts[split])
        for split, part in parts.items():
            part.replace(folder / f"{split}.parquet")
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)
    for split, rows in splits.items():
        say(f"{folder / split}.parquet: {len(rows)} rows")
    example = next(iter(splits.values()))[0]
    say(f"example prompt: {example['prompt'][0]['content']}")
    say(f"example answer: {example['reward_model']['ground_truth']}")


def run(build: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> int:
    """Parse the command line and build; errors that a user can fix are one message and exit status 1."""
    options = parser.parse_args()
    try:
        build(options)
    except (DataError, OSError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 1
    return 0
