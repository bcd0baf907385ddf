"""Asks a frontend for completions and compares each with `dsv4-kv generate` alone.

    python check.py http://127.0.0.1:8000 hash target/release/dsv4-kv tests/e2e/hash

Ends with 1 if one differs.
"""

import json
import random
import subprocess
import sys
import time
import urllib.request

url, model, program, checkpoint = sys.argv[1:]
random.seed(1)
text = "".join(random.choice("abcdefghij klmnop") for _ in range(300))
prompts = [("Once", 20), (text[:1], 8), (text[:129], 8), (text, 8), (text, 8), (text[:256] + "zz", 8)]
wrong = 0
for prompt, tokens in prompts:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begun = time.time()
    with urllib.request.urlopen(asked, timeout=300) as answer:
        got = json.load(answer)
    seconds = time.time() - begun
    command = [program, "generate", "--model", checkpoint, "--prompt", prompt]
    command += ["--max-tokens", str(tokens), "--device", "cpu", "--json"]
    alone = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    equal = got["choices"][0]["text"] == alone["text"]
    wrong += not equal
    cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
    said = "equal" if equal else "DIFFERENT"
    print(f"{len(prompt)} tokens, {cached} not computed where it was decoded, {seconds:.1f} s: {said}")
sys.exit(wrong > 0)
