// The PTX text of device_kernels.cu, by tools/house/kernels_ptx.py with nvcc 13.0, V13.0.88. It asks for PTX 6.4,
// which has all that it uses: nvcc's text asks for PTX 9.0, which drivers older than CUDA 13 refuse.
// tests/driver/test_kernels.py makes it again, and assembles it for the devices of today.
#pragma once

namespace memmgr {

inline constexpr char kDeviceKernels[] = R"PTX(
.version 6.4 .target sm_75 .address_size 64 .visible .entry mm_sum( .param .u64 mm_sum_param_0, .param .u64
mm_sum_param_1, .param .u64 mm_sum_param_2 ) { .reg .pred %p<26>; .reg .b32 %r<43>; .reg .b64 %rd<250>; ld.param.u64
%rd59, [mm_sum_param_0]; ld.param.u64 %rd56, [mm_sum_param_1]; ld.param.u64 %rd57, [mm_sum_param_2]; cvta.to.global.u64
%rd1, %rd59; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; cvt.u64.u32 %rd2, %r3; mul.wide.u32 %rd60, %r2, %r3; mov.u32
%r1, %tid.x; cvt.u64.u32 %rd61, %r1; add.s64 %rd3, %rd60, %rd61; mov.u32 %r4, %nctaid.x; cvt.u64.u32 %rd4, %r4;
mul.wide.u32 %rd5, %r4, %r3; and.b64 %rd62, %rd59, 15; setp.eq.s64 %p1, %rd62, 0; mov.u64 %rd237, 0; shr.u64 %rd63,
%rd56, 4; selp.b64 %rd6, %rd63, 0, %p1; add.s64 %rd64, %rd56, 7; shr.u64 %rd7, %rd64, 3; setp.ge.u64 %p2, %rd3, %rd6;
@%p2 bra $L__BB0_6; mul.lo.s64 %rd66, %rd4, %rd2; shl.b64 %rd8, %rd66, 4; mov.u64 %rd237, 0; mov.u64 %rd235, %rd3;
$L__BB0_2: .pragma "nounroll"; shl.b64 %rd67, %rd235, 4; add.s64 %rd11, %rd1, %rd67; ld.global.v2.u64 {%rd68, %rd69},
[%rd11]; mul.lo.s64 %rd72, %rd235, 4354685564936845354; add.s64 %rd73, %rd72, -7046029254386353131; xor.b64 %rd74,
%rd68, %rd73; shr.u64 %rd75, %rd74, 32; xor.b64 %rd76, %rd75, %rd74; mul.lo.s64 %rd77, %rd76, -2960836687051489901;
shr.u64 %rd78, %rd77, 29; xor.b64 %rd79, %rd78, %rd77; mul.lo.s64 %rd80, %rd79, -2960836687051489901; shr.u64 %rd81,
%rd80, 32; xor.b64 %rd82, %rd81, %rd80; add.s64 %rd83, %rd72, 4354685564936845354; xor.b64 %rd84, %rd69, %rd83; shr.u64
%rd85, %rd84, 32; xor.b64 %rd86, %rd85, %rd84; mul.lo.s64 %rd87, %rd86, -2960836687051489901; shr.u64 %rd88, %rd87, 29;
xor.b64 %rd89, %rd88, %rd87; mul.lo.s64 %rd90, %rd89, -2960836687051489901; shr.u64 %rd91, %rd90, 32; xor.b64 %rd92,
%rd91, %rd90; add.s64 %rd93, %rd92, %rd237; add.s64 %rd237, %rd93, %rd82; add.s64 %rd13, %rd235, %rd5; setp.ge.u64 %p3,
%rd13, %rd6; @%p3 bra $L__BB0_6; add.s64 %rd14, %rd11, %rd8; ld.global.v2.u64 {%rd94, %rd95}, [%rd14]; mul.lo.s64 %rd98,
%rd13, 4354685564936845354; add.s64 %rd99, %rd98, -7046029254386353131; xor.b64 %rd100, %rd94, %rd99; shr.u64 %rd101,
%rd100, 32; xor.b64 %rd102, %rd101, %rd100; mul.lo.s64 %rd103, %rd102, -2960836687051489901; shr.u64 %rd104, %rd103, 29;
xor.b64 %rd105, %rd104, %rd103; mul.lo.s64 %rd106, %rd105, -2960836687051489901; shr.u64 %rd107, %rd106, 32; xor.b64
%rd108, %rd107, %rd106; add.s64 %rd109, %rd98, 4354685564936845354; xor.b64 %rd110, %rd95, %rd109; shr.u64 %rd111,
%rd110, 32; xor.b64 %rd112, %rd111, %rd110; mul.lo.s64 %rd113, %rd112, -2960836687051489901; shr.u64 %rd114, %rd113, 29;
xor.b64 %rd115, %rd114, %rd113; mul.lo.s64 %rd116, %rd115, -2960836687051489901; shr.u64 %rd117, %rd116, 32; xor.b64
%rd118, %rd117, %rd116; add.s64 %rd119, %rd118, %rd237; add.s64 %rd237, %rd119, %rd108; add.s64 %rd16, %rd13, %rd5;
setp.ge.u64 %p4, %rd16, %rd6; @%p4 bra $L__BB0_6; add.s64 %rd17, %rd14, %rd8; ld.global.v2.u64 {%rd120, %rd121},
[%rd17]; mul.lo.s64 %rd124, %rd16, 4354685564936845354; add.s64 %rd125, %rd124, -7046029254386353131; xor.b64 %rd126,
%rd120, %rd125; shr.u64 %rd127, %rd126, 32; xor.b64 %rd128, %rd127, %rd126; mul.lo.s64 %rd129, %rd128,
-2960836687051489901; shr.u64 %rd130, %rd129, 29; xor.b64 %rd131, %rd130, %rd129; mul.lo.s64 %rd132, %rd131,
-2960836687051489901; shr.u64 %rd133, %rd132, 32; xor.b64 %rd134, %rd133, %rd132; add.s64 %rd135, %rd124,
4354685564936845354; xor.b64 %rd136, %rd121, %rd135; shr.u64 %rd137, %rd136, 32; xor.b64 %rd138, %rd137, %rd136;
mul.lo.s64 %rd139, %rd138, -2960836687051489901; shr.u64 %rd140, %rd139, 29; xor.b64 %rd141, %rd140, %rd139; mul.lo.s64
%rd142, %rd141, -2960836687051489901; shr.u64 %rd143, %rd142, 32; xor.b64 %rd144, %rd143, %rd142; add.s64 %rd145,
%rd144, %rd237; add.s64 %rd237, %rd145, %rd134; add.s64 %rd19, %rd16, %rd5; setp.ge.u64 %p5, %rd19, %rd6; @%p5 bra
$L__BB0_6; add.s64 %rd146, %rd17, %rd8; ld.global.v2.u64 {%rd147, %rd148}, [%rd146]; mul.lo.s64 %rd151, %rd19,
4354685564936845354; add.s64 %rd152, %rd151, -7046029254386353131; xor.b64 %rd153, %rd147, %rd152; shr.u64 %rd154,
%rd153, 32; xor.b64 %rd155, %rd154, %rd153; mul.lo.s64 %rd156, %rd155, -2960836687051489901; shr.u64 %rd157, %rd156, 29;
xor.b64 %rd158, %rd157, %rd156; mul.lo.s64 %rd159, %rd158, -2960836687051489901; shr.u64 %rd160, %rd159, 32; xor.b64
%rd161, %rd160, %rd159; add.s64 %rd162, %rd151, 4354685564936845354; xor.b64 %rd163, %rd148, %rd162; shr.u64 %rd164,
%rd163, 32; xor.b64 %rd165, %rd164, %rd163; mul.lo.s64 %rd166, %rd165, -2960836687051489901; shr.u64 %rd167, %rd166, 29;
xor.b64 %rd168, %rd167, %rd166; mul.lo.s64 %rd169, %rd168, -2960836687051489901; shr.u64 %rd170, %rd169, 32; xor.b64
%rd171, %rd170, %rd169; add.s64 %rd172, %rd171, %rd237; add.s64 %rd237, %rd172, %rd161; add.s64 %rd235, %rd19, %rd5;
setp.lt.u64 %p6, %rd235, %rd6; @%p6 bra $L__BB0_2; $L__BB0_6: shl.b64 %rd173, %rd6, 1; add.s64 %rd239, %rd173, %rd3;
setp.ge.u64 %p7, %rd239, %rd7; @%p7 bra $L__BB0_18; shl.b64 %rd175, %rd239, 3; sub.s64 %rd24, %rd175, %rd56; shl.b64
%rd25, %rd5, 3; add.s64 %rd26, %rd1, 1; mov.u64 %rd174, 0; mov.u64 %rd238, %rd174; $L__BB0_8: mul.lo.s64 %rd177, %rd25,
%rd238; add.s64 %rd178, %rd24, %rd177; max.u64 %rd30, %rd178, -8; shl.b64 %rd31, %rd239, 3; setp.ge.u64 %p8, %rd31,
%rd56; mov.u64 %rd248, %rd174; @%p8 bra $L__BB0_17; neg.s64 %rd182, %rd30; mov.u64 %rd246, 0; and.b64 %rd32, %rd182, 3;
setp.gt.u64 %p9, %rd30, -4; mov.u64 %rd245, %rd31; mov.u64 %rd248, %rd246; @%p9 bra $L__BB0_13; add.s64 %rd33, %rd30,
%rd32; add.s64 %rd34, %rd26, %rd31; mov.u64 %rd241, 0; mov.u64 %rd246, %rd241; mov.u64 %rd248, %rd241; $L__BB0_11:
add.s64 %rd186, %rd34, %rd246; ld.global.u8 %rd187, [%rd186+-1]; cvt.u32.u64 %r5, %rd241; shl.b64 %rd188, %rd187, %r5;
or.b64 %rd189, %rd188, %rd248; ld.global.u8 %rd190, [%rd186]; add.s64 %rd191, %rd241, 8; cvt.u32.u64 %r6, %rd191;
shl.b64 %rd192, %rd190, %r6; or.b64 %rd193, %rd192, %rd189; ld.global.u8 %rd194, [%rd186+1]; add.s64 %rd195, %rd241, 16;
cvt.u32.u64 %r7, %rd195; shl.b64 %rd196, %rd194, %r7; or.b64 %rd197, %rd196, %rd193; ld.global.u8 %rd198, [%rd186+2];
add.s64 %rd199, %rd241, 24; cvt.u32.u64 %r8, %rd199; shl.b64 %rd200, %rd198, %r8; or.b64 %rd248, %rd200, %rd197; add.s64
%rd246, %rd246, 4; add.s64 %rd201, %rd33, %rd246; add.s64 %rd241, %rd241, 32; setp.ne.s64 %p10, %rd201, 0; @%p10 bra
$L__BB0_11; add.s64 %rd245, %rd31, %rd246; $L__BB0_13: setp.eq.s64 %p11, %rd32, 0; @%p11 bra $L__BB0_17; add.s64 %rd202,
%rd1, %rd245; ld.global.u8 %rd203, [%rd202]; cvt.u32.u64 %r9, %rd246; shl.b32 %r10, %r9, 3; shl.b64 %rd204, %rd203,
%r10; or.b64 %rd248, %rd204, %rd248; setp.eq.s64 %p12, %rd32, 1; @%p12 bra $L__BB0_17; add.s64 %rd205, %rd246, %rd31;
add.s64 %rd47, %rd1, %rd205; ld.global.u8 %rd206, [%rd47+1]; add.s64 %rd207, %rd246, 1; cvt.u32.u64 %r11, %rd207;
shl.b32 %r12, %r11, 3; shl.b64 %rd208, %rd206, %r12; or.b64 %rd248, %rd208, %rd248; setp.eq.s64 %p13, %rd32, 2; @%p13
bra $L__BB0_17; ld.global.u8 %rd209, [%rd47+2]; add.s64 %rd210, %rd246, 2; cvt.u32.u64 %r13, %rd210; shl.b32 %r14, %r13,
3; shl.b64 %rd211, %rd209, %r14; or.b64 %rd248, %rd211, %rd248; $L__BB0_17: mul.lo.s64 %rd212, %rd239,
-7046029254386353131; add.s64 %rd213, %rd212, -7046029254386353131; xor.b64 %rd214, %rd248, %rd213; shr.u64 %rd215,
%rd214, 32; xor.b64 %rd216, %rd215, %rd214; mul.lo.s64 %rd217, %rd216, -2960836687051489901; shr.u64 %rd218, %rd217, 29;
xor.b64 %rd219, %rd218, %rd217; mul.lo.s64 %rd220, %rd219, -2960836687051489901; shr.u64 %rd221, %rd220, 32; xor.b64
%rd222, %rd221, %rd220; add.s64 %rd237, %rd222, %rd237; add.s64 %rd239, %rd239, %rd5; setp.lt.u64 %p14, %rd239, %rd7;
add.s64 %rd238, %rd238, 1; @%p14 bra $L__BB0_8; $L__BB0_18: mov.b64 {%r15,%r16}, %rd237; mov.u32 %r35, 2; mov.u32 %r36,
31; mov.u32 %r37, 16; mov.u32 %r38, -1; shfl.sync.down.b32 %r18|%p15, %r16, %r37, %r36, %r38; shfl.sync.down.b32
%r17|%p16, %r15, %r37, %r36, %r38; mov.b64 %rd224, {%r17,%r18}; add.s64 %rd225, %rd224, %rd237; mov.b64 {%r19,%r20},
%rd225; mov.u32 %r39, 8; shfl.sync.down.b32 %r22|%p17, %r20, %r39, %r36, %r38; shfl.sync.down.b32 %r21|%p18, %r19, %r39,
%r36, %r38; mov.b64 %rd226, {%r21,%r22}; add.s64 %rd227, %rd226, %rd225; mov.b64 {%r23,%r24}, %rd227; mov.u32 %r40, 4;
shfl.sync.down.b32 %r26|%p19, %r24, %r40, %r36, %r38; shfl.sync.down.b32 %r25|%p20, %r23, %r40, %r36, %r38; mov.b64
%rd228, {%r25,%r26}; add.s64 %rd229, %rd228, %rd227; mov.b64 {%r27,%r28}, %rd229; shfl.sync.down.b32 %r30|%p21, %r28,
%r35, %r36, %r38; shfl.sync.down.b32 %r29|%p22, %r27, %r35, %r36, %r38; mov.b64 %rd230, {%r29,%r30}; add.s64 %rd231,
%rd230, %rd229; mov.b64 {%r31,%r32}, %rd231; mov.u32 %r41, 1; shfl.sync.down.b32 %r34|%p23, %r32, %r41, %r36, %r38;
shfl.sync.down.b32 %r33|%p24, %r31, %r41, %r36, %r38; mov.b64 %rd232, {%r33,%r34}; add.s64 %rd55, %rd232, %rd231;
and.b32 %r42, %r1, 31; setp.ne.s32 %p25, %r42, 0; @%p25 bra $L__BB0_20; cvta.to.global.u64 %rd233, %rd57;
atom.global.add.u64 %rd234, [%rd233], %rd55; $L__BB0_20: ret; } .visible .entry mm_compare( .param .u64
mm_compare_param_0, .param .u64 mm_compare_param_1, .param .u64 mm_compare_param_2, .param .u64 mm_compare_param_3,
.param .u64 mm_compare_param_4 ) { .reg .pred %p<93>; .reg .b16 %rs<26>; .reg .b32 %r<189>; .reg .b64 %rd<108>;
ld.param.u64 %rd33, [mm_compare_param_0]; ld.param.u64 %rd34, [mm_compare_param_1]; ld.param.u64 %rd30,
[mm_compare_param_2]; ld.param.u64 %rd31, [mm_compare_param_3]; ld.param.u64 %rd32, [mm_compare_param_4];
cvta.to.global.u64 %rd1, %rd33; cvta.to.global.u64 %rd2, %rd34; mov.u32 %r17, %ctaid.x; mov.u32 %r18, %ntid.x;
cvt.u64.u32 %rd3, %r18; mul.wide.u32 %rd35, %r17, %r18; mov.u32 %r1, %tid.x; cvt.u64.u32 %rd36, %r1; add.s64 %rd4,
%rd35, %rd36; mov.u32 %r19, %nctaid.x; cvt.u64.u32 %rd5, %r19; mul.wide.u32 %rd6, %r19, %r18; or.b64 %rd37, %rd33,
%rd34; and.b64 %rd38, %rd37, 15; setp.eq.s64 %p1, %rd38, 0; shr.u64 %rd39, %rd30, 4; selp.b64 %rd7, %rd39, 0, %p1;
setp.ge.u64 %p2, %rd4, %rd7; mov.u32 %r186, 0; @%p2 bra $L__BB1_6; mul.lo.s64 %rd40, %rd5, %rd3; shl.b64 %rd8, %rd40, 4;
mov.u32 %r186, 0; mov.u64 %rd106, %rd4; $L__BB1_2: .pragma "nounroll"; shl.b64 %rd41, %rd106, 4; add.s64 %rd10, %rd1,
%rd41; ld.global.v2.u64 {%rd42, %rd43}, [%rd10]; add.s64 %rd11, %rd2, %rd41; ld.global.v2.u64 {%rd46, %rd47}, [%rd11];
cvt.u32.u64 %r21, %rd42; cvt.u32.u64 %r22, %rd46; setp.eq.s32 %p3, %r21, %r22; and.b64 %rd50, %rd46, 4294967295;
setp.eq.s64 %p4, %rd50, %rd31; setp.ne.s32 %p5, %r21, %r22; selp.u32 %r23, 1, 0, %p5; selp.b32 %r24, 2, 8, %p4; or.pred
%p6, %p3, %p4; selp.b32 %r25, 0, 4, %p6; shr.u64 %rd51, %rd42, 32; cvt.u32.u64 %r26, %rd51; shr.u64 %rd52, %rd46, 32;
cvt.u32.u64 %r27, %rd52; setp.eq.s32 %p7, %r26, %r27; setp.eq.s64 %p8, %rd52, %rd31; setp.ne.s32 %p9, %r26, %r27;
selp.u32 %r28, 1, 0, %p9; selp.b32 %r29, 2, 8, %p8; or.pred %p10, %p8, %p7; selp.b32 %r30, 0, 4, %p10; cvt.u32.u64 %r31,
%rd43; cvt.u32.u64 %r32, %rd47; setp.eq.s32 %p11, %r31, %r32; and.b64 %rd53, %rd47, 4294967295; setp.eq.s64 %p12, %rd53,
%rd31; setp.ne.s32 %p13, %r31, %r32; selp.u32 %r33, 1, 0, %p13; selp.b32 %r34, 2, 8, %p12; or.pred %p14, %p11, %p12;
selp.b32 %r35, 0, 4, %p14; shr.u64 %rd54, %rd43, 32; cvt.u32.u64 %r36, %rd54; shr.u64 %rd55, %rd47, 32; cvt.u32.u64
%r37, %rd55; setp.eq.s32 %p15, %r36, %r37; setp.eq.s64 %p16, %rd55, %rd31; setp.ne.s32 %p17, %r36, %r37; selp.u32 %r38,
1, 0, %p17; selp.b32 %r39, 2, 8, %p16; or.pred %p18, %p16, %p15; selp.b32 %r40, 0, 4, %p18; or.b32 %r41, %r186, %r23;
or.b32 %r42, %r41, %r24; or.b32 %r43, %r42, %r29; or.b32 %r44, %r43, %r33; or.b32 %r45, %r44, %r34; or.b32 %r46, %r45,
%r39; or.b32 %r47, %r46, %r28; or.b32 %r48, %r47, %r25; or.b32 %r49, %r48, %r38; or.b32 %r50, %r49, %r35; or.b32 %r51,
%r50, %r30; or.b32 %r186, %r51, %r40; add.s64 %rd12, %rd106, %rd6; setp.ge.u64 %p19, %rd12, %rd7; @%p19 bra $L__BB1_6;
add.s64 %rd13, %rd10, %rd8; ld.global.v2.u64 {%rd56, %rd57}, [%rd13]; add.s64 %rd14, %rd11, %rd8; ld.global.v2.u64
{%rd60, %rd61}, [%rd14]; cvt.u32.u64 %r52, %rd56; cvt.u32.u64 %r53, %rd60; setp.eq.s32 %p20, %r52, %r53; and.b64 %rd64,
%rd60, 4294967295; setp.eq.s64 %p21, %rd64, %rd31; setp.ne.s32 %p22, %r52, %r53; selp.u32 %r54, 1, 0, %p22; selp.b32
%r55, 2, 8, %p21; or.pred %p23, %p20, %p21; selp.b32 %r56, 0, 4, %p23; shr.u64 %rd65, %rd56, 32; cvt.u32.u64 %r57,
%rd65; shr.u64 %rd66, %rd60, 32; cvt.u32.u64 %r58, %rd66; setp.eq.s32 %p24, %r57, %r58; setp.eq.s64 %p25, %rd66, %rd31;
setp.ne.s32 %p26, %r57, %r58; selp.u32 %r59, 1, 0, %p26; selp.b32 %r60, 2, 8, %p25; or.pred %p27, %p25, %p24; selp.b32
%r61, 0, 4, %p27; cvt.u32.u64 %r62, %rd57; cvt.u32.u64 %r63, %rd61; setp.eq.s32 %p28, %r62, %r63; and.b64 %rd67, %rd61,
4294967295; setp.eq.s64 %p29, %rd67, %rd31; setp.ne.s32 %p30, %r62, %r63; selp.u32 %r64, 1, 0, %p30; selp.b32 %r65, 2,
8, %p29; or.pred %p31, %p28, %p29; selp.b32 %r66, 0, 4, %p31; shr.u64 %rd68, %rd57, 32; cvt.u32.u64 %r67, %rd68; shr.u64
%rd69, %rd61, 32; cvt.u32.u64 %r68, %rd69; setp.eq.s32 %p32, %r67, %r68; setp.eq.s64 %p33, %rd69, %rd31; setp.ne.s32
%p34, %r67, %r68; selp.u32 %r69, 1, 0, %p34; selp.b32 %r70, 2, 8, %p33; or.pred %p35, %p33, %p32; selp.b32 %r71, 0, 4,
%p35; or.b32 %r72, %r186, %r54; or.b32 %r73, %r72, %r55; or.b32 %r74, %r73, %r60; or.b32 %r75, %r74, %r64; or.b32 %r76,
%r75, %r65; or.b32 %r77, %r76, %r70; or.b32 %r78, %r77, %r59; or.b32 %r79, %r78, %r56; or.b32 %r80, %r79, %r69; or.b32
%r81, %r80, %r66; or.b32 %r82, %r81, %r61; or.b32 %r186, %r82, %r71; add.s64 %rd15, %rd12, %rd6; setp.ge.u64 %p36,
%rd15, %rd7; @%p36 bra $L__BB1_6; add.s64 %rd16, %rd13, %rd8; ld.global.v2.u64 {%rd70, %rd71}, [%rd16]; add.s64 %rd17,
%rd14, %rd8; ld.global.v2.u64 {%rd74, %rd75}, [%rd17]; cvt.u32.u64 %r83, %rd70; cvt.u32.u64 %r84, %rd74; setp.eq.s32
%p37, %r83, %r84; and.b64 %rd78, %rd74, 4294967295; setp.eq.s64 %p38, %rd78, %rd31; setp.ne.s32 %p39, %r83, %r84;
selp.u32 %r85, 1, 0, %p39; selp.b32 %r86, 2, 8, %p38; or.pred %p40, %p37, %p38; selp.b32 %r87, 0, 4, %p40; shr.u64
%rd79, %rd70, 32; cvt.u32.u64 %r88, %rd79; shr.u64 %rd80, %rd74, 32; cvt.u32.u64 %r89, %rd80; setp.eq.s32 %p41, %r88,
%r89; setp.eq.s64 %p42, %rd80, %rd31; setp.ne.s32 %p43, %r88, %r89; selp.u32 %r90, 1, 0, %p43; selp.b32 %r91, 2, 8,
%p42; or.pred %p44, %p42, %p41; selp.b32 %r92, 0, 4, %p44; cvt.u32.u64 %r93, %rd71; cvt.u32.u64 %r94, %rd75; setp.eq.s32
%p45, %r93, %r94; and.b64 %rd81, %rd75, 4294967295; setp.eq.s64 %p46, %rd81, %rd31; setp.ne.s32 %p47, %r93, %r94;
selp.u32 %r95, 1, 0, %p47; selp.b32 %r96, 2, 8, %p46; or.pred %p48, %p45, %p46; selp.b32 %r97, 0, 4, %p48; shr.u64
%rd82, %rd71, 32; cvt.u32.u64 %r98, %rd82; shr.u64 %rd83, %rd75, 32; cvt.u32.u64 %r99, %rd83; setp.eq.s32 %p49, %r98,
%r99; setp.eq.s64 %p50, %rd83, %rd31; setp.ne.s32 %p51, %r98, %r99; selp.u32 %r100, 1, 0, %p51; selp.b32 %r101, 2, 8,
%p50; or.pred %p52, %p50, %p49; selp.b32 %r102, 0, 4, %p52; or.b32 %r103, %r186, %r85; or.b32 %r104, %r103, %r86; or.b32
%r105, %r104, %r91; or.b32 %r106, %r105, %r95; or.b32 %r107, %r106, %r96; or.b32 %r108, %r107, %r101; or.b32 %r109,
%r108, %r90; or.b32 %r110, %r109, %r87; or.b32 %r111, %r110, %r100; or.b32 %r112, %r111, %r97; or.b32 %r113, %r112,
%r92; or.b32 %r186, %r113, %r102; add.s64 %rd18, %rd15, %rd6; setp.ge.u64 %p53, %rd18, %rd7; @%p53 bra $L__BB1_6;
add.s64 %rd84, %rd16, %rd8; ld.global.v2.u64 {%rd85, %rd86}, [%rd84]; add.s64 %rd89, %rd17, %rd8; ld.global.v2.u64
{%rd90, %rd91}, [%rd89]; cvt.u32.u64 %r114, %rd85; cvt.u32.u64 %r115, %rd90; setp.eq.s32 %p54, %r114, %r115; and.b64
%rd94, %rd90, 4294967295; setp.eq.s64 %p55, %rd94, %rd31; setp.ne.s32 %p56, %r114, %r115; selp.u32 %r116, 1, 0, %p56;
selp.b32 %r117, 2, 8, %p55; or.pred %p57, %p54, %p55; selp.b32 %r118, 0, 4, %p57; shr.u64 %rd95, %rd85, 32; cvt.u32.u64
%r119, %rd95; shr.u64 %rd96, %rd90, 32; cvt.u32.u64 %r120, %rd96; setp.eq.s32 %p58, %r119, %r120; setp.eq.s64 %p59,
%rd96, %rd31; setp.ne.s32 %p60, %r119, %r120; selp.u32 %r121, 1, 0, %p60; selp.b32 %r122, 2, 8, %p59; or.pred %p61,
%p59, %p58; selp.b32 %r123, 0, 4, %p61; cvt.u32.u64 %r124, %rd86; cvt.u32.u64 %r125, %rd91; setp.eq.s32 %p62, %r124,
%r125; and.b64 %rd97, %rd91, 4294967295; setp.eq.s64 %p63, %rd97, %rd31; setp.ne.s32 %p64, %r124, %r125; selp.u32 %r126,
1, 0, %p64; selp.b32 %r127, 2, 8, %p63; or.pred %p65, %p62, %p63; selp.b32 %r128, 0, 4, %p65; shr.u64 %rd98, %rd86, 32;
cvt.u32.u64 %r129, %rd98; shr.u64 %rd99, %rd91, 32; cvt.u32.u64 %r130, %rd99; setp.eq.s32 %p66, %r129, %r130;
setp.eq.s64 %p67, %rd99, %rd31; setp.ne.s32 %p68, %r129, %r130; selp.u32 %r131, 1, 0, %p68; selp.b32 %r132, 2, 8, %p67;
or.pred %p69, %p67, %p66; selp.b32 %r133, 0, 4, %p69; or.b32 %r134, %r186, %r116; or.b32 %r135, %r134, %r117; or.b32
%r136, %r135, %r122; or.b32 %r137, %r136, %r126; or.b32 %r138, %r137, %r127; or.b32 %r139, %r138, %r132; or.b32 %r140,
%r139, %r121; or.b32 %r141, %r140, %r118; or.b32 %r142, %r141, %r131; or.b32 %r143, %r142, %r128; or.b32 %r144, %r143,
%r123; or.b32 %r186, %r144, %r133; add.s64 %rd106, %rd18, %rd6; setp.lt.u64 %p70, %rd106, %rd7; @%p70 bra $L__BB1_2;
$L__BB1_6: add.s64 %rd100, %rd30, 3; shr.u64 %rd20, %rd100, 2; shl.b64 %rd101, %rd7, 2; add.s64 %rd107, %rd101, %rd4;
setp.ge.u64 %p71, %rd107, %rd20; @%p71 bra $L__BB1_25; cvt.u16.u64 %rs1, %rd31; $L__BB1_8: shl.b64 %rd23, %rd107, 2;
setp.ge.u64 %p72, %rd23, %rd30; add.s64 %rd24, %rd1, %rd23; mov.u16 %rs18, %rs1; @%p72 bra $L__BB1_10; ld.global.u8
%rs18, [%rd24]; $L__BB1_10: add.s64 %rd25, %rd23, 1; setp.ge.u64 %p73, %rd25, %rd30; mov.u16 %rs19, %rs1; @%p73 bra
$L__BB1_12; ld.global.u8 %rs19, [%rd24+1]; $L__BB1_12: cvt.u32.u16 %r145, %rs18; and.b32 %r146, %r145, 255; cvt.u32.u16
%r147, %rs19; prmt.b32 %r9, %r147, %r146, 30212; add.s64 %rd26, %rd23, 2; setp.ge.u64 %p74, %rd26, %rd30; mov.u16 %rs20,
%rs1; @%p74 bra $L__BB1_14; ld.global.u8 %rs20, [%rd24+2]; $L__BB1_14: cvt.u32.u16 %r148, %rs20; shl.b32 %r149, %r148,
16; and.b32 %r150, %r149, 16711680; or.b32 %r10, %r150, %r9; add.s64 %rd27, %rd23, 3; setp.ge.u64 %p75, %rd27, %rd30;
mov.u16 %rs21, %rs1; @%p75 bra $L__BB1_16; ld.global.u8 %rs21, [%rd24+3]; $L__BB1_16: add.s64 %rd28, %rd2, %rd23;
mov.u16 %rs22, %rs1; @%p72 bra $L__BB1_18; ld.global.u8 %rs22, [%rd28]; $L__BB1_18: mov.u16 %rs23, %rs1; @%p73 bra
$L__BB1_20; ld.global.u8 %rs23, [%rd28+1]; $L__BB1_20: cvt.u32.u16 %r151, %rs22; and.b32 %r152, %r151, 255; cvt.u32.u16
%r153, %rs23; prmt.b32 %r11, %r153, %r152, 30212; mov.u16 %rs24, %rs1; @%p74 bra $L__BB1_22; ld.global.u8 %rs24,
[%rd28+2]; $L__BB1_22: cvt.u32.u16 %r154, %rs24; shl.b32 %r155, %r154, 16; and.b32 %r156, %r155, 16711680; or.b32 %r12,
%r156, %r11; mov.u16 %rs25, %rs1; @%p75 bra $L__BB1_24; ld.global.u8 %rs25, [%rd28+3]; $L__BB1_24: cvt.u32.u16 %r157,
%rs25; shl.b32 %r158, %r157, 24; or.b32 %r159, %r158, %r12; cvt.u32.u16 %r160, %rs21; shl.b32 %r161, %r160, 24; or.b32
%r162, %r161, %r10; setp.eq.s32 %p80, %r162, %r159; cvt.u64.u32 %rd102, %r159; setp.eq.s64 %p81, %rd102, %rd31;
setp.ne.s32 %p82, %r162, %r159; selp.u32 %r163, 1, 0, %p82; selp.b32 %r164, 2, 8, %p81; or.pred %p83, %p80, %p81;
selp.b32 %r165, 0, 4, %p83; or.b32 %r166, %r186, %r163; or.b32 %r167, %r166, %r164; or.b32 %r186, %r167, %r165; add.s64
%rd107, %rd107, %rd6; setp.lt.u64 %p84, %rd107, %rd20; @%p84 bra $L__BB1_8; $L__BB1_25: mov.u32 %r168, 2; mov.u32 %r169,
31; mov.u32 %r170, 16; mov.u32 %r171, -1; shfl.sync.down.b32 %r172|%p85, %r186, %r170, %r169, %r171; or.b32 %r173,
%r172, %r186; mov.u32 %r174, 8; shfl.sync.down.b32 %r175|%p86, %r173, %r174, %r169, %r171; or.b32 %r176, %r175, %r173;
mov.u32 %r177, 4; shfl.sync.down.b32 %r178|%p87, %r176, %r177, %r169, %r171; or.b32 %r179, %r178, %r176;
shfl.sync.down.b32 %r180|%p88, %r179, %r168, %r169, %r171; or.b32 %r181, %r180, %r179; mov.u32 %r182, 1;
shfl.sync.down.b32 %r183|%p89, %r181, %r182, %r169, %r171; or.b32 %r15, %r183, %r181; and.b32 %r184, %r1, 31;
setp.ne.s32 %p90, %r184, 0; setp.eq.s32 %p91, %r15, 0; or.pred %p92, %p90, %p91; @%p92 bra $L__BB1_27; cvt.u64.u32
%rd103, %r15; cvta.to.global.u64 %rd104, %rd32; atom.global.or.b64 %rd105, [%rd104], %rd103; $L__BB1_27: ret; } .visible
.entry mm_fill( .param .u64 mm_fill_param_0, .param .u64 mm_fill_param_1, .param .u64 mm_fill_param_2 ) { .reg .pred
%p<6>; .reg .b16 %rs<2>; .reg .b32 %r<5>; .reg .b64 %rd<23>; ld.param.u64 %rd12, [mm_fill_param_0]; ld.param.u64 %rd10,
[mm_fill_param_1]; ld.param.u64 %rd11, [mm_fill_param_2]; cvta.to.global.u64 %rd1, %rd12; mov.u32 %r1, %ctaid.x; mov.u32
%r2, %ntid.x; mul.wide.u32 %rd13, %r1, %r2; mov.u32 %r3, %tid.x; cvt.u64.u32 %rd14, %r3; add.s64 %rd2, %rd13, %rd14;
mov.u32 %r4, %nctaid.x; mul.wide.u32 %rd3, %r4, %r2; and.b64 %rd15, %rd12, 15; setp.eq.s64 %p1, %rd15, 0; shr.u64 %rd16,
%rd10, 4; selp.b64 %rd4, %rd16, 0, %p1; setp.ge.u64 %p2, %rd2, %rd4; @%p2 bra $L__BB2_3; mov.u64 %rd21, %rd2; $L__BB2_2:
shl.b64 %rd17, %rd21, 4; add.s64 %rd18, %rd1, %rd17; st.global.v2.u64 [%rd18], {%rd11, %rd11}; add.s64 %rd21, %rd21,
%rd3; setp.lt.u64 %p3, %rd21, %rd4; @%p3 bra $L__BB2_2; $L__BB2_3: shl.b64 %rd19, %rd4, 4; add.s64 %rd22, %rd19, %rd2;
setp.ge.u64 %p4, %rd22, %rd10; @%p4 bra $L__BB2_6; cvt.u16.u64 %rs1, %rd11; $L__BB2_5: add.s64 %rd20, %rd1, %rd22;
st.global.u8 [%rd20], %rs1; add.s64 %rd22, %rd22, %rd3; setp.lt.u64 %p5, %rd22, %rd10; @%p5 bra $L__BB2_5; $L__BB2_6:
ret; } .visible .entry mm_word( .param .u64 mm_word_param_0, .param .u64 mm_word_param_1 ) { .reg .pred %p<2>; .reg .b32
%r<4>; .reg .b64 %rd<9>; ld.param.u64 %rd1, [mm_word_param_0]; ld.param.u64 %rd2, [mm_word_param_1]; mov.u32 %r1,
%ctaid.x; mov.u32 %r2, %ntid.x; mul.wide.u32 %rd3, %r1, %r2; mov.u32 %r3, %tid.x; cvt.u64.u32 %rd4, %r3; neg.s64 %rd5,
%rd4; setp.ne.s64 %p1, %rd3, %rd5; @%p1 bra $L__BB3_2; cvta.to.global.u64 %rd6, %rd1; ld.global.u64 %rd7, [%rd6];
cvta.to.global.u64 %rd8, %rd2; st.global.u64 [%rd8], %rd7; $L__BB3_2: ret; } .visible .entry mm_delay( .param .u64
mm_delay_param_0 ) { .reg .pred %p<2>; .reg .b64 %rd<6>; ld.param.u64 %rd3, [mm_delay_param_0]; mov.u64 %rd2, %clock64;
shl.b64 %rd4, %rd3, 1; add.s64 %rd1, %rd2, %rd4; $L__BB4_1: mov.u64 %rd5, %clock64; setp.lt.s64 %p1, %rd5, %rd1; @%p1
bra $L__BB4_1; ret; }
)PTX";

}  // namespace memmgr
