"""A ring of two or three small devices: this one runs the first blocks and generates, the others hold the rest.

On every other device, once (docs/ring.md):

    swarm server MODEL --blocks 5:12 --new-swarm --cache-tokens 8192

Then here, with the address that it prints:

    python examples/ring.py MODEL --initial-peers ADDRESS --local-blocks 0:5 "Once upon a time" "In the beginning"
"""

from __future__ import annotations

import argparse
import time

from transformers import AutoTokenizer

from swarm import AutoDistributedModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="local folder or hub id")
    parser.add_argument("texts", nargs="+", help="one prompt per lane; as many lanes as devices keep all devices busy")
    parser.add_argument("--initial-peers", nargs="+", help="addresses to join by; default: $SWARM_INITIAL_PEERS")
    parser.add_argument("--local-blocks", default="0:1", help="blocks that this device computes")
    parser.add_argument("--max-new-tokens", type=int, default=50)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoDistributedModelForCausalLM.from_pretrained(
        arguments.model,
        initial_peers=arguments.initial_peers,
        local_blocks=arguments.local_blocks,
        show_route=True,
    )
    inputs = tokenizer(arguments.texts, return_tensors="pt", padding=True)
    began = time.perf_counter()
    written = model.generate(
        **inputs, max_new_tokens=arguments.max_new_tokens, pad_token_id=tokenizer.pad_token_id, lanes="auto"
    )
    seconds = time.perf_counter() - began
    for text in tokenizer.batch_decode(written, skip_special_tokens=True):
        print(text, end="\n\n")
    tokens = written[:, inputs["input_ids"].shape[1] :].numel()
    print(f"{tokens / seconds:.1f} tokens/s of all texts together")
    model.swarm.close()


if __name__ == "__main__":
    main()
