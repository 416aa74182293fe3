"""`lora`: adapters of low rank as PEFT saves them, several in one step."""

from ferrule_plugins.adapter_bank.lora.bank import LoraBank

__all__ = ["LoraBank"]
