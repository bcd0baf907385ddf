"""Real clients against `cargo kv serve`: curl, and the package `openai` from PyPI.

    cargo kv serve --model tests/e2e/hash --device cpu --listen 127.0.0.1:8000 \
        --max-requests 16 --context 512 --max-total-tokens 768 --draft 2 &
    python tests/clients/openai_client.py --url http://127.0.0.1:8000 \
        --program target/release/dsv4-kv --model tests/e2e/hash

Every completion that comes to its end is compared with what `dsv4-kv generate` (--program) answers alone, also
while other clients disconnect at random. In the end the cache is empty. Needs a checkpoint whose text is bytes.
"""

import argparse
import asyncio
import json
import random
import subprocess
import time
import urllib.request

import openai

ARGS = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
ARGS.add_argument("--url", default="http://127.0.0.1:8000")
ARGS.add_argument("--program", required=True, help="the program dsv4-kv, built with --features serve")
ARGS.add_argument("--model", required=True)
ARGS.add_argument("--requests", type=int, default=64, help="how many at once")
ARGS.add_argument("--seed", type=int, default=1)
args = ARGS.parse_args()

CLIENT = openai.OpenAI(base_url=f"{args.url}/v1", api_key="none", max_retries=0)
MODEL = CLIENT.models.list().data[0].id
ALONE = {}


def alone(prompt, max_tokens, temperature=0.0, top_p=1.0, seed=0):
    """What one request without a server gets."""
    key = (prompt, max_tokens, temperature, top_p, seed)
    if key not in ALONE:
        command = [args.program, "generate", "--model", args.model, "--device", "cpu", "--json"]
        options = {"prompt": prompt, "max-tokens": max_tokens, "temperature": temperature, "top-p": top_p}
        for name, value in {**options, "seed": seed}.items():
            command += [f"--{name}={value}"]
        run = subprocess.run(command, capture_output=True, check=True)
        ALONE[key] = json.loads(run.stdout)["text"]
    return ALONE[key]


def complete(**fields):
    return CLIENT.completions.create(model=MODEL, **fields)


def joined(stream):
    """The texts and reasons of a stream, by choice, and its usage."""
    texts, reasons, usage = {}, {}, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            assert choice.index not in reasons, "a piece behind the last"
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, usage


def check(name):
    print(f"ok  {name}", flush=True)


def single_completions():
    assert CLIENT.models.retrieve(MODEL).id == MODEL
    fields = dict(max_tokens=12, temperature=0.8, top_p=0.9, seed=5)
    expected = alone("hello", 12, 0.8, 0.9, 5)
    answer = complete(prompt="hello", **fields)
    assert answer.choices[0].text == expected, (answer.choices[0].text, expected)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    answer = complete(prompt=list(b"hello"), **fields)
    assert answer.choices[0].text == expected
    stream = complete(prompt="hello", stream=True, stream_options={"include_usage": True}, **fields)
    texts, reasons, usage = joined(stream)
    assert (texts, reasons) == ({0: expected}, {0: "length"})
    assert usage.total_tokens == 17
    check("text, token ids and a stream give what the model answers alone")


def several():
    prompts = ["one", "two"]
    for stream in (False, True):
        answer = complete(prompt=prompts, n=3, seed=20, max_tokens=8, stream=stream)
        if stream:
            texts, reasons, _ = joined(answer)
            texts = [texts[index] for index in range(6)]
            assert len(reasons) == 6
        else:
            texts = [choice.text for choice in answer.choices]
            assert [choice.index for choice in answer.choices] == list(range(6))
        assert texts == [alone(prompt, 8, 1.0, 1.0, 20 + i) for prompt in prompts for i in range(3)]
    both = complete(prompt=[list(b"one"), list(b"two")], max_tokens=8, temperature=0)
    assert [choice.text for choice in both.choices] == [alone(prompt, 8) for prompt in prompts]
    other = complete(prompt="one", max_tokens=16), complete(prompt="one", max_tokens=16)
    assert other[0].choices[0].text != other[1].choices[0].text, "without a seed it is random"
    check("several prompts, n and seeds")


def stops():
    text = alone("stop here", 24)
    for length in (1, 2, 3):
        for at in range(4, 12):
            stop = text[at : at + length]
            for stream in (False, True):
                answer = complete(
                    prompt="stop here", max_tokens=24, temperature=0, stop=[stop, "~~~"], stream=stream
                )
                if stream:
                    texts, reasons, _ = joined(answer)
                    got, reason = texts.get(0, ""), reasons[0]
                else:
                    got, reason = answer.choices[0].text, answer.choices[0].finish_reason
                assert (got, reason) == (text[: text.find(stop)], "stop"), (got, stop, text)
    check("stops across borders of tokens, whole and in a stream")


def logprobs():
    answer = complete(prompt="probable", max_tokens=10, temperature=0, logprobs=3)
    told = answer.choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 10
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs):
        assert logprob <= 0 and top[token] == logprob == max(top.values()), (token, logprob, top)
    check("logprobs")


def load_generators():
    """What `vllm bench serve`, GuideLLM and lm-eval send."""
    model = json.load(urllib.request.urlopen(f"{args.url}/v1/models"))["data"][0]
    assert (model["root"], model["max_model_len"]) == (MODEL, 512), model
    body = {"ignore_eos": True, "min_tokens": 8, "repetition_penalty": 1.0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = complete(
        prompt="bench", max_tokens=8, temperature=0, stream=True, stream_options=options, extra_body=body
    )
    texts, reasons, usage = joined(stream)
    assert (texts, reasons) == ({0: alone("bench", 8)}, {0: "length"})
    assert usage.completion_tokens == 8 and usage.prompt_tokens_details.cached_tokens == 0
    ids = list(b"likely")
    answer = complete(prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    told = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith("likely") and len(told.tokens) == len(ids) + 1
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    for logprob, top in zip(told.token_logprobs[1:-1], told.top_logprobs[1:-1]):
        assert logprob <= max(top.values()) <= 0, (logprob, top)
    check("requests of load generators, and a prompt that is scored")


def refused(kind, **fields):
    try:
        complete(**{"prompt": "x", **fields})
    except kind as error:
        return error
    raise AssertionError(f"{fields} was taken")


def errors():
    assert refused(openai.BadRequestError, presence_penalty=0.5).param == "presence_penalty"
    assert refused(openai.BadRequestError, best_of=2).param == "best_of"
    assert refused(openai.BadRequestError, logit_bias={"1": 1}).param == "logit_bias"
    assert refused(openai.BadRequestError, max_tokens=10**6).code == "context_length_exceeded"
    assert refused(openai.BadRequestError, prompt="").param == "prompt"
    too_long = refused(openai.APIStatusError, prompt="x" * (9 << 20))
    assert too_long.status_code == 413
    try:
        CLIENT.completions.create(model="other", prompt="x")
        raise AssertionError("another model was taken")
    except openai.NotFoundError as error:
        assert error.code == "model_not_found"
    check("errors as the package's types, with the field's name")


def curl():
    body = {"model": MODEL, "prompt": "curl", "max_tokens": 6, "temperature": 0}
    command = ["curl", "-sS", "-N", f"{args.url}/v1/completions", "-H", "content-type: application/json", "-d"]
    whole = subprocess.run([*command, json.dumps(body)], capture_output=True, check=True).stdout
    assert json.loads(whole)["choices"][0]["text"] == alone("curl", 6)
    streamed = json.dumps({**body, "stream": True})
    events = subprocess.run([*command, streamed], capture_output=True, check=True).stdout.decode()
    data = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in data[:-1])
    assert text == alone("curl", 6)
    # One that is killed in the middle.
    endless = json.dumps({**body, "max_tokens": 400, "stream": True})
    process = subprocess.Popen([*command, endless], stdout=subprocess.PIPE)
    process.stdout.readline()
    process.kill()
    process.wait()
    check("curl, whole, in a stream and killed")


async def one(client, index, choose):
    """One client: what it got, and what it should, or None where it left early."""
    length = choose.choice([3, 20, 60, 120])
    prompt = "".join(choose.choice("abcdefgh ") for _ in range(length))
    fields = dict(max_tokens=choose.randint(1, 40), temperature=choose.choice([0.0, 1.0]), top_p=0.95, seed=index)
    leaves = choose.choice([None, None, "whole", "stream"])
    stream = leaves == "stream" or (leaves is None and choose.random() < 0.5)
    patience = choose.uniform(0.05, 2)
    pieces = choose.randint(0, 4)
    await asyncio.sleep(choose.uniform(0, 1))
    request = client.completions.create(model=MODEL, prompt=prompt, stream=stream, **fields)
    try:
        answer = await (asyncio.wait_for(request, patience) if leaves == "whole" else request)
    except asyncio.TimeoutError:
        return None
    if not stream:
        return answer.choices[0].text, (prompt, fields)
    text = ""
    async for event in answer:
        text += event.choices[0].text
        if leaves == "stream":
            pieces -= 1
            if pieces < 0 and event.choices[0].finish_reason is None:
                await answer.close()
                return None
    return text, (prompt, fields)


async def many():
    choose = random.Random(args.seed)
    async with openai.AsyncOpenAI(base_url=f"{args.url}/v1", api_key="none", max_retries=0) as client:
        seeds = [random.Random(choose.random()) for _ in range(args.requests)]
        return await asyncio.gather(*(one(client, index, seed) for index, seed in enumerate(seeds)))


def at_once():
    results = asyncio.run(many())
    finished = [result for result in results if result]
    for text, (prompt, fields) in finished:
        assert text == alone(prompt, **fields), (prompt, fields, text)
    check(f"{len(results)} at once: {len(finished)} finished as alone, {len(results) - len(finished)} left early")


def metrics():
    lines = urllib.request.urlopen(f"{args.url}/metrics").read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))


def empty_cache():
    deadline = time.monotonic() + 60
    while True:
        now = {name: float(value) for name, value in metrics().items()}
        held = now["dsv4_kv_blocks_used"] + now["dsv4_kv_blocks_cached"]
        if not (held or now["dsv4_num_requests_running"] or now["dsv4_num_requests_waiting"]):
            break
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    for name, value in now.items():
        if not any(part in name for part in ("bucket", "_sum", "_count")):
            print(f"    {name} {value:g}")
    check("the cache is empty")


if __name__ == "__main__":
    began = time.monotonic()
    for part in (single_completions, several, stops, logprobs, load_generators, errors, curl, at_once, empty_cache):
        part()
    print(f"passed in {time.monotonic() - began:.0f} s, openai {openai.__version__}")
