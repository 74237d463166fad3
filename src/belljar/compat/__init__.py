"""The interfaces of Belljar's five design documents, each in a module of its own, over the engine.

    hybrid     execute_code(code_string, project_path, ...) -> dict   Docker, WebAssembly, hybrid
    levels     create_runner(level).execute(code, context)             three security levels
    strategy   get_sandbox().execute(code, language, timeout)          chosen by SANDBOX_TYPE
    manager    SandboxManager(config).execute(command)                 commands, for a Bash tool

A program written after one of the documents runs with its import line changed. The modules
translate names and answers, and do nothing that `belljar.run` cannot do: new code is better served
by that. docs/documents.md has an example for each.
"""
