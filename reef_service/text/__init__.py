"""Messages to token ids and token ids to messages, with the model's own tokenizer and chat template, without torch."""
