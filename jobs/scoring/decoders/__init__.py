"""One bench for decoders: rules of published samplers, learned ones and their controls on the same text and prompts."""
