from benchmarks.gpu.bench import Step
STEP = Step("prefill", "prefill", 1.0, lambda bench: [])
