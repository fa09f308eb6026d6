// The engine's RTL, compiled by Verilator, on a modelled DDR memory, as a C library for ctypes.
//
// The memory answers each port's bursts in order after `latency` cycles, at most one beat a port a cycle, and all
// ports together at most `bytes_per_cycle`, reads and writes. Who is served when the bandwidth does not do for all is the
// arbiter's matter: fair (in random order each cycle) or fixed (writes, then the lowest port). Faults are set by number.
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "Ve4_engine.h"
#include "verilated.h"

namespace {

constexpr int kBeatBytes = E4_BEAT / 8;

// Verilator keeps signals of all widths as little-endian words, so bits can be taken from their bytes.
uint64_t take(const void* signal, int low, int n) {
    uint64_t value = 0;
    const auto* bytes = static_cast<const uint8_t*>(signal);
    for (int i = 0; i < n; i++) value |= uint64_t((bytes[(low + i) / 8] >> ((low + i) % 8)) & 1) << i;
    return value;
}

void put(void* signal, int low, int n, uint64_t value) {
    auto* bytes = static_cast<uint8_t*>(signal);
    for (int i = 0; i < n; i++) {
        uint8_t bit = uint8_t(1u << ((low + i) % 8));
        if ((value >> i) & 1) bytes[(low + i) / 8] |= bit;
        else bytes[(low + i) / 8] &= uint8_t(~bit);
    }
}

// AXI: what is offered stays as it is until it is taken.
struct Offer {
    bool waits = false;
    uint64_t addr = 0, rest = 0;
};

void keep(Offer& offer, bool valid, bool ready, uint64_t addr, uint64_t rest) {
    if (offer.waits && (!valid || addr != offer.addr || rest != offer.rest)) std::abort();
    offer = {valid && !ready, addr, rest};
}

struct Burst {
    uint64_t addr;
    int n_left;
    bool id;
    uint64_t due;
};

struct Write {
    uint64_t addr;
    int n_left;
    bool failed;
};

}  // namespace

extern "C" {

// Numbers of e4_set; a test holds them to hw/fpga/sim/engine.py's.
enum Setting {
    kLatency = 0,          // cycles from address to first beat
    kMilliBytesPerCycle,   // all ports together; 0 is no limit
    kFixedArbiter,         // 1: the lowest port first
    kStallPermille,        // of cycles in which a ready or valid is withheld at random
    kSeed,
    kErrorFrom,            // reads that touch [from, to) are answered with SLVERR
    kErrorTo,
    kWriteErrorFrom,
    kWriteErrorTo,
    kSilentAfter,          // beats until memory stops answering; 0 never does
    kFlipBeat,             // the n-th beat read from now on has its lowest bit flipped; 0 none
};

struct E4Sim {
    std::unique_ptr<VerilatedContext> context;
    std::unique_ptr<Ve4_engine> top;
    uint8_t* memory;
    uint64_t base, size;
    uint64_t now = 0, n_beats = 0;
    uint64_t settings[16] = {};
    std::deque<Burst> reads[E4_PORTS];
    std::deque<Write> writes;
    Offer offers[E4_PORTS + 1];     // addresses that memory has not taken yet; the last one is of writes
    std::deque<uint64_t> answers;   // responses of writes: when due, and bit 63 for an error
    double tokens = 0;
    std::mt19937_64 random;
    bool inside(uint64_t addr, uint64_t n) const { return addr >= base && addr - base + n <= size; }
    bool stalls() { return settings[kStallPermille] && random() % 1000 < settings[kStallPermille]; }
    bool touches(uint64_t addr, Setting from) const {
        return settings[from + 1] && addr + kBeatBytes > settings[from] && addr < settings[from + 1];
    }
    void drive();
    void tick();
};

void E4Sim::drive() {
    // Inputs of this cycle, from what memory knows; called while the clock is low.
    bool silent = settings[kSilentAfter] && n_beats >= settings[kSilentAfter];
    double cap = settings[kMilliBytesPerCycle] / 1000.0;
    if (cap > 0) tokens = std::min(tokens + cap, cap + 2.0 * kBeatBytes * E4_PORTS);
    int order[E4_PORTS + 1];    // -1 are the writes
    for (int p = 0; p <= E4_PORTS; p++) order[p] = p - 1;
    if (!settings[kFixedArbiter])
        for (int p = E4_PORTS; p > 0; p--) std::swap(order[p], order[random() % (p + 1)]);
    put(&top->m_rvalid, 0, E4_PORTS, 0);
    top->m_wready = 0;
    uint64_t n_coming = n_beats;  // several ports may get one in the same cycle
    for (int p : order) {
        if (p < 0) {
            if (writes.empty() || silent || stalls() || (cap > 0 && tokens < kBeatBytes)) continue;
            top->m_wready = 1;
            if (top->m_wvalid) tokens -= kBeatBytes;
            continue;
        }
        put(&top->m_arready, p, 1, reads[p].size() < 32 && !stalls());
        if (reads[p].empty() || silent || reads[p].front().due > now || stalls()) continue;
        if (cap > 0) {
            if (tokens < kBeatBytes) continue;
            tokens -= kBeatBytes;
        }
        Burst& burst = reads[p].front();
        bool error = !inside(burst.addr, kBeatBytes) || touches(burst.addr, kErrorFrom);
        uint8_t beat[kBeatBytes] = {};
        if (!error) std::memcpy(beat, memory + (burst.addr - base), kBeatBytes);
        if (++n_coming == settings[kFlipBeat]) beat[0] ^= 1;
        std::memcpy(reinterpret_cast<uint8_t*>(&top->m_rdata) + p * kBeatBytes, beat, kBeatBytes);
        put(&top->m_rvalid, p, 1, 1);
        put(&top->m_rid, p, 1, burst.id);
        put(&top->m_rresp, 2 * p, 2, error ? 2 : 0);
        put(&top->m_rlast, p, 1, burst.n_left == 1);
    }
    top->m_awready = writes.size() < 8 && !stalls();
    top->m_bvalid = !answers.empty() && !silent && (answers.front() & ~(1ull << 63)) <= now;
    top->m_bresp = top->m_bvalid && (answers.front() >> 63) ? 2 : 0;
}

void E4Sim::tick() {
    top->clk = 0;
    drive();
    top->eval();
    // What the rising edge hands over.
    for (int p = 0; p < E4_PORTS; p++) {
        if (take(&top->m_rvalid, p, 1)) {
            Burst& burst = reads[p].front();
            burst.addr += kBeatBytes;
            n_beats++;
            if (--burst.n_left == 0) reads[p].pop_front();
        }
        keep(offers[p], take(&top->m_arvalid, p, 1), take(&top->m_arready, p, 1), take(&top->m_araddr, E4_ADDR * p, E4_ADDR),
             take(&top->m_arlen, 8 * p, 8) << 1 | take(&top->m_arid, p, 1));
        if (take(&top->m_arvalid, p, 1) && take(&top->m_arready, p, 1)) {
            Burst burst{take(&top->m_araddr, E4_ADDR * p, E4_ADDR), int(take(&top->m_arlen, 8 * p, 8)) + 1,
                        bool(take(&top->m_arid, p, 1)), now + settings[kLatency]};
            // AXI: a burst must not cross 4 KiB.
            if ((burst.addr ^ (burst.addr + uint64_t(burst.n_left) * kBeatBytes - 1)) >> 12) std::abort();
            reads[p].push_back(burst);
        }
    }
    keep(offers[E4_PORTS], top->m_awvalid, top->m_awready, top->m_awaddr, top->m_awlen);
    if (top->m_bvalid) answers.pop_front();
    if (top->m_wvalid && top->m_wready) {
        Write& write = writes.front();
        bool error = !inside(write.addr, kBeatBytes) || touches(write.addr, kWriteErrorFrom);
        const auto* data = reinterpret_cast<const uint8_t*>(&top->m_wdata);
        for (int i = 0; i < kBeatBytes && !error; i++)
            if ((top->m_wstrb >> i) & 1) memory[write.addr - base + i] = data[i];
        write.addr += kBeatBytes;
        write.failed |= error;
        bool last = --write.n_left == 0;
        if (last != bool(top->m_wlast)) std::abort();
        if (last) {
            bool failed = write.failed;
            writes.pop_front();
            answers.push_back((now + settings[kLatency]) | (failed ? 1ull << 63 : 0));
        }
    }
    if (top->m_awvalid && top->m_awready) writes.push_back({top->m_awaddr, int(top->m_awlen) + 1, false});
    top->clk = 1;
    top->eval();
    now++;
}

E4Sim* e4_new(uint8_t* memory, uint64_t base, uint64_t size) {
    auto* sim = new E4Sim;
    sim->context = std::make_unique<VerilatedContext>();
    sim->top = std::make_unique<Ve4_engine>(sim->context.get());
    sim->memory = memory;
    sim->base = base;
    sim->size = size;
    sim->settings[kLatency] = 40;
    sim->top->resetn = 0;
    sim->top->s_bready = 1;
    sim->top->s_rready = 1;
    for (int i = 0; i < 8; i++) sim->tick();
    sim->top->resetn = 1;
    sim->tick();
    return sim;
}

void e4_free(E4Sim* sim) {
    sim->top->final();
    delete sim;
}

void e4_set(E4Sim* sim, int setting, uint64_t value) {
    sim->settings[setting] = value;
    if (setting == kSeed) sim->random.seed(value);
    if (setting == kSilentAfter && value) sim->settings[setting] = sim->n_beats + value;
    if (setting == kFlipBeat && value) sim->settings[setting] = sim->n_beats + value;
}

// Both return AXI's response: 0 is OKAY, 2 SLVERR.
int e4_write(E4Sim* sim, uint32_t addr, uint32_t value) {
    auto& top = *sim->top;
    top.s_awvalid = top.s_wvalid = 1;
    top.s_awaddr = addr;
    top.s_wdata = value;
    top.s_wstrb = 15;
    bool taken = false;
    while (!taken) {
        top.clk = 0;
        top.eval();
        taken = top.s_awready;
        sim->tick();
    }
    top.s_awvalid = top.s_wvalid = 0;
    int response = top.s_bresp;
    sim->tick();
    return response;
}

int e4_read(E4Sim* sim, uint32_t addr, uint32_t* value) {
    auto& top = *sim->top;
    top.s_arvalid = 1;
    top.s_araddr = addr;
    sim->tick();
    top.s_arvalid = 0;
    *value = top.s_rdata;
    int response = top.s_rresp;
    sim->tick();
    return response;
}

// Run until the interrupt is raised, at most n cycles; returns the cycles that were run.
uint64_t e4_run(E4Sim* sim, uint64_t n) {
    uint64_t start = sim->now;
    while (sim->now - start < n && !sim->top->irq) sim->tick();
    return sim->now - start;
}

// Run for n cycles, interrupt or not: the time that passes between two accesses of a program.
void e4_step(E4Sim* sim, uint64_t n) {
    while (n--) sim->tick();
}

uint64_t e4_beats(const E4Sim* sim) { return sim->n_beats; }

}  // extern "C"
