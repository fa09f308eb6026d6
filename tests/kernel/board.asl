// A board for a QEMU guest of the q35 kind: two CPUs with five P-states, a power meter, a thermal zone and a battery.
//
// The P-state register is I/O port 0xB3, the APM status latch: it reads back what was written. Power and temperature
// follow it, so that a real kernel's drivers have something to control and to read. All watts are modelled.
DefinitionBlock ("", "SSDT", 2, "EDGERT", "BOARD", 0x00000001)
{
    External (\_SB.CPUS.C000, ProcessorObj)
    External (\_SB.CPUS.C001, ProcessorObj)

    Scope (\_SB)
    {
        OperationRegion (LTCH, SystemIO, 0xB3, 1)
        Field (LTCH, ByteAcc, NoLock, Preserve)
        {
            STAT, 8
        }

        // MHz, mW, µs to change, µs of the bus master, control, status: both are MHz / 100
        Name (PSTS, Package ()
        {
            Package () { 2400, 5000, 10, 10, 24, 24 },
            Package () { 2000, 3200, 10, 10, 20, 20 },
            Package () { 1500, 1800, 10, 10, 15, 15 },
            Package () { 1000, 900, 10, 10, 10, 10 },
            Package () { 600, 486, 10, 10, 6, 6 }
        })
        Name (PREG, Package ()
        {
            ResourceTemplate () { Register (SystemIO, 8, 0, 0xB3, 1) },
            ResourceTemplate () { Register (SystemIO, 8, 0, 0xB3, 1) }
        })
        // Both CPUs have one clock, which any of them may set.
        Name (PDOM, Package () { Package () { 5, 0, 0, 0xFC, 2 } })

        Method (MILW, 0, NotSerialized)
        {
            If (LGreaterEqual (STAT, 24)) { Return (5929) }
            If (LGreaterEqual (STAT, 20)) { Return (3900) }
            If (LGreaterEqual (STAT, 15)) { Return (2100) }
            If (LGreaterEqual (STAT, 10)) { Return (1100) }
            Return (486)
        }

        Device (PMTR)
        {
            Name (_HID, "ACPI000D")
            Name (_UID, 0)
            Method (_STA, 0, NotSerialized) { Return (0x0F) }
            // It measures, in mW, what goes in; new each 100 ms; no cap, no trip points.
            Name (_PMC, Package ()
            {
                1, 0, 0, 100000, 100, 100, 1000, 0, 0, 0, 0, "BOARD", "1", "EDGERT"
            })
            Method (_PMM, 0, NotSerialized) { Return (MILW ()) }
            Name (AVGI, 100)
            Method (_PAI, 1, NotSerialized) { Store (Arg0, AVGI) Return (0) }
            Method (_GAI, 0, NotSerialized) { Return (AVGI) }
            Name (_PMD, Package () { \_SB })
        }

        ThermalZone (TZ00)
        {
            // 47 °C at 600 MHz, 83 °C at 2.4 GHz, in tenths of a kelvin
            Method (_TMP, 0, NotSerialized) { Return (Add (3081, Multiply (STAT, 20))) }
            Method (_PSV, 0, NotSerialized) { Return (3681) }
            Method (_CRT, 0, NotSerialized) { Return (3881) }
            Name (_PSL, Package () { \_SB.CPUS.C000, \_SB.CPUS.C001 })
            Name (_TC1, 1)
            Name (_TC2, 1)
            Name (_TSP, 10)
            Name (_TZP, 10)
        }

        Device (BAT0)
        {
            Name (_HID, EisaId ("PNP0C0A"))
            Name (_UID, 0)
            Method (_STA, 0, NotSerialized) { Return (0x1F) }
            Name (_BIF, Package ()
            {
                0, 50000, 50000, 1, 11400, 5000, 1000, 1, 1, "BOARD", "1", "LION", "EDGERT"
            })
            // Discharging, at what the meter shows, 40 of 50 Wh left, at 11.4 V
            Name (BSTP, Package () { 1, 0, 40000, 11400 })
            Method (_BST, 0, NotSerialized)
            {
                Store (MILW (), Index (BSTP, 1))
                Return (BSTP)
            }
            Name (_PCL, Package () { \_SB })
        }
    }

    Scope (\_SB.CPUS.C000)
    {
        Method (_PCT, 0, NotSerialized) { Return (\_SB.PREG) }
        Method (_PSS, 0, NotSerialized) { Return (\_SB.PSTS) }
        Method (_PSD, 0, NotSerialized) { Return (\_SB.PDOM) }
        Name (_PPC, 0)
    }
    Scope (\_SB.CPUS.C001)
    {
        Method (_PCT, 0, NotSerialized) { Return (\_SB.PREG) }
        Method (_PSS, 0, NotSerialized) { Return (\_SB.PSTS) }
        Method (_PSD, 0, NotSerialized) { Return (\_SB.PDOM) }
        Name (_PPC, 0)
    }
}
