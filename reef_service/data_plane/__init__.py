"""From a request to recorded tokens: admission, routing, the call to an engine, text and back."""
