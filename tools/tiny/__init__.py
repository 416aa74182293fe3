"""The maker of the embedded model, and its judge: generated dialogues, training, evaluation."""
