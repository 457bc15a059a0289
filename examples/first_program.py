"""The first program: three prompts that share their beginning, answered together; nothing shared is computed twice."""

import radixrt as rx

PREFIX = "The capital of France is Paris. The capital of Italy is Rome. The capital of"
PROMPTS = [f"{PREFIX} {country} is" for country in ("Japan", "Spain", "Egypt")]

if __name__ == "__main__":
    with rx.Engine("smollm2-135m") as engine:
        outputs = engine.generate(PROMPTS, rx.SamplingParams(max_tokens=8, temperature=0.0, stop="."))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"{prompt}{output.text}")
            print(f"  {output.usage.prompt_tokens} prompt tokens, {output.usage.computed_tokens} computed")
