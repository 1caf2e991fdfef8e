"""llama-index with its defaults: parallel_tool_calls is false, and a function is required."""

from conftest import MODEL, City, Weather
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def llm(address: str) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        api_base=address,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=512,
        max_tokens=200,
        temperature=0,
        max_retries=0,
    )


def test_an_answer_with_a_form(address: str) -> None:
    answer = llm(address).structured_predict(Weather, PromptTemplate("What is the weather in Paris?"))
    assert isinstance(answer, Weather)


def weather(city: City) -> str:
    """How it is outside."""
    return f"sun in {city}"


def test_tools(address: str) -> None:
    tools = [FunctionTool.from_defaults(weather)]
    answer = llm(address).chat_with_tools(tools, user_msg="What is the weather in Paris?")
    assert answer.message is not None
    forced = llm(address).chat_with_tools(tools, user_msg="What is the weather in Paris?", tool_required=True)
    (call,) = llm(address).get_tool_calls_from_response(forced)
    assert call.tool_name == "weather"
    assert set(call.tool_kwargs) == {"city"}
