"""Tool calls as a workload: rows in the form of BFCL, and how functions reach a model."""

import json

import pytest
from jinja2 import Environment, TemplateError

from selfspec_cli.config.compose import compose_runs
from selfspec_cli.config.schema import ConfigError
from selfspec_cli.texts.prompt_files import encoded, read
from selfspec_cli.texts.prompts import workload_prompts
from selfspec_cli.texts.tokens import Tokens

SCHEMA = {
    "type": "dict",
    "required": ["city"],
    "properties": {
        "city": {"type": "String", "description": "where"},
        "type": {"type": "tuple", "items": {"type": "float"}},
        "more": {"type": "any", "description": "x"},
        "age": {"type": "integer"},
    },
}
FUNCTION = {"name": "weather", "description": "Says it.", "parameters": SCHEMA, "response": {"type": "dict"}}
ROW = {
    "id": "live_simple_3-1-0",
    "question": [[{"role": "system", "content": "Be short."}, {"role": "user", "content": "Rain in Oslo?"}]],
    "function": [FUNCTION],
}
WITH_TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}"
MESSAGES = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"


class Template(Tokens):
    """A tokenizer whose tokens are characters, with a chat template."""

    max_model_len, vocab_size = 10_000, 0x110000
    has_template = True

    def __init__(self, template, system=True):
        self.template, self.system = Environment().from_string(template), system

    @property
    def tokenizer(self):
        return self

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, tools=None):
        if messages[0]["role"] == "system" and not self.system:
            raise TemplateError("system role not supported")
        return self.template.render(messages=messages, tools=tools)

    def encode(self, text, **_):
        return [*map(ord, text)]


def text_of(ids):
    return "".join(map(chr, ids))


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def row(tmp_path):
    (found,) = read(str(jsonl(tmp_path / "BFCL_v4_live_simple.json", ROW)))
    return found


def test_a_row_has_its_kind_and_functions_with_types_of_json_schema(row):
    assert (row.text, row.category, row.chat, row.system) == ("Rain in Oslo?", "live_simple", True, "Be short.")
    (tool,) = row.tools
    assert tool["type"] == "function" and tool["function"].keys() == {"name", "description", "parameters"}
    parameters = tool["function"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["city"])
    assert parameters["properties"] == {
        "city": {"type": "string", "description": "where"},
        "type": {"type": "array", "items": {"type": "number"}},
        "more": {"description": "x"},
        "age": {"type": "integer"},
    }


def test_turns_are_kept_and_functions_of_classes_are_read_from_beside_the_file(tmp_path):
    said = [[{"role": "user", "content": "a"}], [], [{"role": "user", "content": "b"}]]
    turns = {
        "id": "multi_turn_miss_func_0",
        "question": said,
        "involved_classes": ["TwitterAPI"],
        "excluded_function": ["post"],
    }
    file = jsonl(tmp_path / "turns.json", turns)
    with pytest.raises(ConfigError, match=r"multi_turn_miss_func_0 calls functions of TwitterAPI.*posting_api\.json"):
        read(str(file))
    memory = jsonl(tmp_path / "memory.json", turns | {"involved_classes": ["MemoryAPI"]})
    with pytest.raises(ConfigError, match="calls functions of MemoryAPI; allowed: GorillaFileSystem, "):
        read(str(memory))
    (tmp_path / "multi_turn_func_doc").mkdir()
    jsonl(tmp_path / "multi_turn_func_doc" / "posting_api.json", FUNCTION, FUNCTION | {"name": "post"})
    (prompt,) = read(str(file))
    assert (prompt.text, prompt.later, prompt.category) == ("a", ("b",), "multi_turn_miss_func")
    assert [tool["function"]["name"] for tool in prompt.tools] == ["weather"]


def test_functions_go_where_the_template_takes_them_and_else_into_a_system_message(row):
    def asked(engine):
        return text_of(row.put_into(engine.chat)(row.text))

    assert asked(Template(WITH_TOOLS + MESSAGES)) == "<weather>system:Be short.|user:Rain in Oslo?|"
    in_words = asked(Template(MESSAGES))
    assert in_words.startswith("system:Be short.\n\nYou can call") and '"name": "weather"' in in_words
    refused = asked(Template(MESSAGES, system=False))
    assert refused.startswith("user:Be short.\n\nYou can call") and refused.endswith("\n\nRain in Oslo?|")
    (plain,) = encoded([row], lambda text: [*map(ord, text)], None, 10_000)
    assert text_of(plain) == row.words and row.words.endswith("\n\nRain in Oslo?")


def test_functions_that_do_not_fit_are_left_out_before_the_question_is_cut(tmp_path):
    functions = [FUNCTION | {"name": name} for name in ("one", "two", "three")]
    (prompt,) = read(str(jsonl(tmp_path / "f.json", ROW | {"function": functions})))
    engine = Template(WITH_TOOLS + MESSAGES)
    whole = "<one><two>system:Be short.|user:Rain in Oslo?|"
    (ids,) = encoded([prompt], engine.encode, engine.chat, len(whole))
    assert text_of(ids) == whole
    (ids,) = encoded([prompt], engine.encode, None, len(prompt.words) - 1)
    assert '"two"' in text_of(ids) and "three" not in text_of(ids) and text_of(ids).endswith("\n\nRain in Oslo?")


def test_the_workload_asks_the_file_that_its_path_names(tmp_path):
    rows = [ROW | {"id": f"{kind}_{number}"} for kind in ("simple_python", "parallel") for number in range(3)]
    file = jsonl(tmp_path / "both.json", *rows)
    (cfg,) = compose_runs(None, ["workload=bfcl", f"workload.path={file}", "workload.num_prompts=2"])
    prompts = workload_prompts(cfg, Template(WITH_TOOLS + MESSAGES))
    assert [text_of(ids)[:9] for ids in prompts] == ["<weather>"] * 2
