"""A TempNet inside an inference server: vLLM (`tempnet.serving.vllm`) and SGLang (`tempnet.serving.sglang`)."""
