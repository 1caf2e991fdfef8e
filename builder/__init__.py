"""From a Hugging Face checkpoint and PEFT adapters to an engine directory."""

from .moved import install

install()
