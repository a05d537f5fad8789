"""Can the critic read what the actor writes? Vocabularies are compared, not only their sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.model_sizes import model_directories
from megarl.config.schema import Config
from megarl.data.retokenise import Retokeniser
from megarl.data.vocabularies import compare_vocabularies
from megarl.errors import ModelError, explain
from megarl.weights.families import read_hf_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "critic.model"


def check_critic_tokenizer(config: Config, load: Callable[[str], PreTrainedTokenizerBase]) -> None:
    """A critic of a directory of its own knows the actor's tokens, or has what it takes to read their text (``critic.retokenize``).

    ``load`` gives the tokenizer of a directory. Raises ModelError.
    """
    actor, critic = config.model, model_directories(config).get(KEY)
    if critic is None or Path(critic).resolve() == Path(actor).resolve():
        return
    for key, directory in (("model", actor), (KEY, critic)):
        if not (Path(directory) / "tokenizer.json").is_file():
            raise ModelError(
                explain(
                    "actor and critic come from two directories, and their vocabularies can't be compared",
                    where=f"{key} = {directory}",
                    got="no tokenizer.json",
                    do="copy the files of the tokenizer that the model was trained with; a slow tokenizer has to be saved as a fast one",
                )
            )
    if config.critic.retokenize:
        _check_reader(config, load(actor), load(critic))
    elif (difference := compare_vocabularies(actor, critic)) is not None:
        raise ModelError(
            explain(
                "the actor's token ids mean other tokens to the critic",
                where=f"{KEY} = {critic}",
                got=f"vocabularies of {actor} and {critic}: {difference}",
                expected="one vocabulary",
                do="use a critic with the actor's tokenizer, or set critic.retokenize: true, and the critic reads the text",
            )
        )


def critic_notes(config: Config) -> list[str]:
    """What there is to say about a critic that is to read the text."""
    critic = model_directories(config).get(KEY)
    if critic is None or not config.critic.retokenize:
        return []
    if Path(critic).resolve() == Path(config.model).resolve() or compare_vocabularies(config.model, critic) is None:
        return ["critic.retokenize: nothing to do, since actor and critic have one vocabulary; the critic reads the actor's tokens"]
    return [f"critic.retokenize: the critic reads the text of the samples with the tokenizer of {critic}"]


def critic_files(config: Config) -> dict[str, Path]:
    """Files that decide what the critic reads, by the recipe's key."""
    critic = model_directories(config).get(KEY)
    return {f"{KEY}/tokenizer.json": Path(critic) / "tokenizer.json"} if critic and config.critic.retokenize else {}


def _check_reader(config: Config, actor: PreTrainedTokenizerBase, critic: PreTrainedTokenizerBase) -> None:
    Retokeniser.of(actor, critic, same=False)  # both can say where their tokens lie in a text
    directory = model_directories(config)[KEY]
    ids, known = max(critic.get_vocab().values()), int(read_hf_config(directory)["vocab_size"])
    if ids >= known:
        raise ModelError(
            explain(
                "the critic's tokenizer has tokens that its model doesn't know",
                where=f"{KEY} = {directory}",
                got=f"id {ids}",
                expected=f"0 to {known - 1} (vocab_size {known} of config.json)",
                do="take tokenizer and weights from one model, or enlarge its embedding (resize_token_embeddings of transformers)",
            )
        )
