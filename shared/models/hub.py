"""Checkpoints by their name on the Hugging Face Hub: `org/name`, or `org/name@revision`.

They lie in huggingface_hub's own cache, whose variables hold: HF_HOME, HF_HUB_CACHE, HF_ENDPOINT,
HF_TOKEN, HF_HUB_OFFLINE. It is imported when a name needs it, and not before.
"""

from __future__ import annotations

import functools
import logging
import re
from pathlib import Path

from shared.errors import CheckpointError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/(?P<name>[\w-][\w.-]*))(@(?P<revision>[\w.-][\w./-]*))?")
_TEXTS = ("*.json", "*.jinja")
_SAFETENSORS = "*.safetensors"
_PICKLED = "pytorch_model*.bin"
# Folders hold the same model in other formats, and so does what Mistral calls consolidated.
_LEFT_OUT = ("*/*", "consolidated*")


def is_hub_name(name: str) -> bool:
    """Return whether a model is named as on the Hub, and no folder is called so here."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def last_part(name: str) -> str:
    """Return what to call a model: the last part of its path, or of its name on the Hub."""
    match = _NAME.fullmatch(name)
    if match is not None and is_hub_name(name):
        return match["name"]
    return Path(name).expanduser().name


@functools.cache
def fetch(name: str, *, with_weights: bool = True) -> Path:
    """Return the folder of a model in the cache, after what it lacks has been downloaded.

    A process asks once for a name, so that it has one revision from its start to its end.

    Args:
        name: For which `is_hub_name` holds.
        with_weights: Weights, too: safetensors, or pytorch_model.bin where there are none.
    Raises: CheckpointError if the model is neither cached nor to be had.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, "a folder"
    patterns = (*_TEXTS, _SAFETENSORS) if with_weights else _TEXTS
    directory = _snapshot(match["repo"], match["revision"], patterns, name)
    if with_weights and not any(directory.glob(_SAFETENSORS)):
        directory = _snapshot(match["repo"], match["revision"], (*_TEXTS, _PICKLED), name)
    logger.info("%s lies in %s", name, directory)
    return directory


def _snapshot(repo: str, revision: str | None, patterns: tuple[str, ...], name: str) -> Path:
    from huggingface_hub import constants, snapshot_download

    try:
        path = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_LEFT_OUT),
        )
    except Exception as error:  # its versions have HTTP clients, and errors, of their own
        reason = " ".join(str(error).split()) or repr(error)
        raise CheckpointError(
            f"{name} is no folder here, and as a model on the Hub it is not cached in "
            f"{constants.HF_HUB_CACHE} and cannot be fetched from {constants.ENDPOINT}: {reason} "
            f"Pass a folder; or mend the name, the network or HF_TOKEN, and run "
            f"`hf download {repo}`"
        ) from error
    return Path(path)
