"""Builds engine directories from Hugging Face checkpoints and PEFT adapters."""

from .moved import install

install()
